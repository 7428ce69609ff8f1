"""The bytes of ids, the byte tokenizer, and text that is not Unicode."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gapless.runtime.tokenizer.base import scalar_text
from gapless.runtime.tokenizer.byte_tokenizer import EOS_ID, ByteTokenizer
from gapless.runtime.tokenizer.load import load_pieces, load_tokenizer
from gapless.runtime.tokenizer.pieces import TokenPieces
from gapless.runtime.tokenizer.spelling import BYTE_ALPHABET, byte_level_piece, sentencepiece_piece


def test_pieces_survive_a_round_trip_through_files(tmp_path: Path) -> None:
    pieces = [b"a", b"", b"\xe4\xb8", b"<eos>"]
    TokenPieces.of(pieces, [3]).save(tmp_path)
    loaded = TokenPieces.load(tmp_path)
    assert [loaded.piece(i) for i in range(len(loaded))] == pieces
    assert [loaded.is_special(i) for i in range(len(loaded))] == [False, False, False, True]


def test_an_id_outside_the_vocabulary_has_no_bytes() -> None:
    pieces = TokenPieces.of([b"a", b"b"], [])
    assert pieces.piece(2) == pieces.piece(-1) == b""
    assert not pieces.is_special(2)
    assert pieces.decode([0, 2, 1, 10**9]) == "ab"


def test_decode_joins_before_it_decodes() -> None:
    pieces = TokenPieces.of([b"\xe8\xaa", b"\x9e", b"</s>"], [2])
    assert pieces.decode([0, 1, 2]) == "語"
    assert pieces.decode([0, 1, 2], skip_special_tokens=False) == "語</s>"
    assert pieces.decode([0]) == "\ufffd"


def test_byte_level_alphabet_is_the_librarys() -> None:
    from tokenizers import pre_tokenizers

    assert set(BYTE_ALPHABET) == set(pre_tokenizers.ByteLevel.alphabet())
    spelled = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(
        "é 語\n\x00~"
    )
    assert byte_level_piece("".join(word for word, _ in spelled)) == "é 語\n\x00~".encode()


def test_a_token_outside_the_byte_level_alphabet_stands_for_itself() -> None:
    assert byte_level_piece("<｜end▁of▁text｜>") == "<｜end▁of▁text｜>".encode()


@pytest.mark.parametrize(
    ("token", "piece"),
    [("▁the", b" the"), ("▁▁", b"  "), ("<0xE8>", b"\xe8"), ("<0xE8>x", b"<0xE8>x"), ("語", "語".encode())],
)
def test_sentencepiece_spelling(token: str, piece: bytes) -> None:
    assert sentencepiece_piece(token) == piece


@given(st.text(st.characters(exclude_categories=())))
def test_byte_tokenizer_takes_any_text_and_gives_it_back(text: str) -> None:
    tokenizer = ByteTokenizer()
    assert tokenizer.decode(tokenizer.encode(text)) == scalar_text(text)


def test_byte_tokenizer_splits_characters_and_prefers_long_merges() -> None:
    tokenizer = ByteTokenizer()
    pieces = [tokenizer.pieces.piece(i) for i in tokenizer.encode("the 世😀")]
    assert pieces == [b"the", b" ", b"\xe4\xb8", b"\x96", b"\xf0\x9f", b"\x98", b"\x80"]


def test_every_byte_tokenizer_id_below_its_size_shows() -> None:
    tokenizer = ByteTokenizer(vocab_size=300)
    assert tokenizer.vocab_size == len(tokenizer.pieces) == 300
    pieces = [tokenizer.pieces.piece(i) for i in range(300)]
    assert all(pieces) and len(set(pieces)) == 300
    assert pieces[:256] == [bytes([i]) for i in range(256)]
    assert tokenizer.decode([65, EOS_ID, 299]) == "A<299>"
    with pytest.raises(ValueError, match="vocab_size is 256"):
        ByteTokenizer(vocab_size=256)


def test_toy_has_the_byte_tokenizer() -> None:
    assert isinstance(load_tokenizer("toy"), ByteTokenizer)
    assert load_pieces("toy").blob == ByteTokenizer().pieces.blob


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("plain 語", "plain 語"),
        ("\ud83d\ude00", "😀"),
        ("x\ud800", "x\ufffd"),
        ("\udc00\ud800y", "\ufffd\ufffdy"),
        ("\ud800\ud800\udc00", "\ufffd\U00010000"),
    ],
)
def test_surrogates_become_the_character_they_pair_to_or_a_replacement(text: str, expected: str) -> None:
    assert scalar_text(text) == expected
