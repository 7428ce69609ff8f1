"""Incremental text equals the one-shot decoding, for any bytes cut anywhere."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gapless.detokenizer.text import IncrementalText, Vocabulary
from gapless.runtime.tokenizer.pieces import TokenPieces

TEXTS = st.text() | st.sampled_from(["語" * 20, "👩‍👩‍👧‍👦🏳️‍🌈", "k 語qr", "\ufffd real", "é" * 9])
PIECES = st.lists(st.binary(max_size=5), max_size=40)


def shown(pieces: list[bytes], special: tuple[int, ...] = (), skip: bool = True) -> list[str]:
    """The text that each piece adds, and the flushed tail."""
    text = IncrementalText(Vocabulary(TokenPieces.of(pieces, special)), skip)
    return [*(text.push(i) for i in range(len(pieces))), text.flush()]


def cut(data: bytes, cuts: list[int]) -> list[bytes]:
    edges = [0, *sorted(c % (len(data) + 1) for c in cuts), len(data)]
    return [data[a:b] for a, b in itertools.pairwise(edges)]


@given(PIECES)
def test_any_bytes(pieces: list[bytes]) -> None:
    assert "".join(shown(pieces)) == b"".join(pieces).decode(errors="replace")


@given(TEXTS, st.lists(st.integers(0, 1000), max_size=20))
def test_any_cut_of_a_text(text: str, cuts: list[int]) -> None:
    deltas = shown(cut(text.encode(), cuts))
    assert "".join(deltas) == text
    assert deltas[-1] == ""


@given(PIECES)
def test_holds_at_most_three_bytes(pieces: list[bytes]) -> None:
    deltas = shown(pieces)
    for count in range(1, len(pieces) + 1):
        whole = b"".join(pieces[:count]).decode(errors="replace")
        so_far = "".join(deltas[:count])
        assert whole.startswith(so_far)
        assert len(whole) - len(so_far) <= 3


def test_a_character_split_over_tokens_is_shown_once() -> None:
    """Pieces that decode cumulatively to "k 語?", "k 語q?", "k 語qr" must not send a character twice."""
    assert shown([b"k \xe8\xaa", b"\x9eq", b"r"]) == ["k ", "語q", "r", ""]


def test_invalid_bytes_flow() -> None:
    assert shown([b"\xff"] * 5000) == ["\ufffd"] * 5000 + [""]


def test_an_output_that_ends_inside_a_character_is_flushed_once() -> None:
    text = IncrementalText(Vocabulary(TokenPieces.of([b"a\xf0\x9f\x8e"], ())), True)
    assert [text.push(0), text.flush(), text.flush()] == ["a", "\ufffd", ""]


@pytest.mark.parametrize(("skip", "want"), [(True, "ab"), (False, "a<eos>b")])
def test_special_tokens(skip: bool, want: str) -> None:
    assert "".join(shown([b"a", b"<eos>", b"b"], special=(1,), skip=skip)) == want


def test_an_id_beyond_the_vocabulary_has_no_text() -> None:
    text = IncrementalText(Vocabulary(TokenPieces.of([b"a"], ())), True)
    assert [text.push(0), text.push(1), text.push(10**6)] == ["a", "", ""]
