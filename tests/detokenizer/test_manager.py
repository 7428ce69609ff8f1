"""What the detokenizer tells the front and the scheduler, step by step."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gapless.detokenizer.manager import DetokenizerManager
from gapless.runtime.core.messages import (
    Closed,
    Finish,
    Finished,
    Opened,
    StepOutput,
    Stop,
    TextOutput,
    column,
    int32s,
    int64s,
)
from gapless.runtime.tokenizer.byte_tokenizer import EOS_ID, ByteTokenizer
from gapless.runtime.tokenizer.pieces import TokenPieces

BYTES = ByteTokenizer().pieces
Row = tuple[int, int, int, Finish]  # slot, generation, id, finish


def opened(
    uid: int, slot: int = 1, generation: int = 1, *stop: str, trim: bool = True, least: int = 0
) -> Opened:
    return Opened(uid, slot, generation, 5, 2, stop, True, not trim, least)


def step(*rows: Row, opened: list[Opened] | None = None, closed: list[Closed] | None = None) -> StepOutput:
    slots, generations, ids, finish = zip(*rows, strict=True) if rows else ((), (), (), ())
    return StepOutput(
        opened or [],
        column(slots, "<i4"),
        column(generations, "<i4"),
        column(ids, "<i4"),
        column(finish, "u1"),
        closed or [],
    )


class Client:
    """Collects what the front would know of every uid."""

    def __init__(self, pieces: TokenPieces = BYTES) -> None:
        self.manager = DetokenizerManager(pieces)
        self.text: dict[int, str] = {}
        self.ids: dict[int, list[int]] = {}
        self.finished: dict[int, Finished] = {}
        self.opened: list[tuple[int, int, int]] = []

    def take(self, message: StepOutput) -> list[Stop]:
        output, stops = self.manager.handle(message)
        self._apply(output)
        return stops

    def _apply(self, output: TextOutput) -> None:
        self.opened += output.opened
        ids, at = int32s(output.ids).tolist(), 0
        for uid, text, count in zip(
            int64s(output.uids).tolist(), output.texts, int32s(output.counts).tolist(), strict=True
        ):
            assert uid not in self.finished
            self.text[uid] = self.text.get(uid, "") + text
            self.ids.setdefault(uid, []).extend(ids[at : at + count])
            at += count
        assert at == len(ids)
        for finished in output.finished:
            assert finished.uid not in self.finished, "two terminal messages"
            self.finished[finished.uid] = finished


def generate(client: Client, ids: list[int], slot: int = 1, generation: int = 1) -> list[Stop]:
    return [stop for i in ids for stop in client.take(step((slot, generation, i, Finish.NONE)))]


def test_a_request_from_slot_to_length_limit() -> None:
    client = Client()
    client.take(step(opened=[opened(7)]))
    assert client.opened == [(7, 5, 2)]
    assert generate(client, list(b"hel")) == []
    assert client.take(step((1, 1, ord("p"), Finish.LENGTH))) == []
    assert (client.text[7], client.ids[7]) == ("help", list(b"help"))
    assert client.finished[7] == Finished(7, Finish.LENGTH, None, "", "", 5, 4, 2)
    assert len(client.manager) == 0


@pytest.mark.parametrize(("trim", "text"), [(True, "ab"), (False, "abZ")])
def test_a_stop_token_counts_and_shows_only_where_not_trimmed(trim: bool, text: str) -> None:
    client = Client()
    client.take(step(opened=[opened(7, trim=trim)]))
    generate(client, list(b"ab"))
    client.take(step((1, 1, ord("Z"), Finish.STOP_TOKEN)))
    assert (client.text[7], client.ids[7]) == (text, list(b"abZ"))
    assert (client.finished[7].matched, client.finished[7].completion_tokens) == (ord("Z"), 3)


def test_eos_is_special_and_never_shows() -> None:
    client = Client()
    client.take(step(opened=[opened(7, trim=False)]))
    client.take(step((1, 1, EOS_ID, Finish.STOP_TOKEN)))
    assert (client.text[7], client.finished[7].matched) == ("", EOS_ID)


@pytest.mark.parametrize(("trim", "text"), [(True, "a"), (False, "aEND##")])
def test_a_stop_string_cuts_text_and_ids_and_is_told_to_the_scheduler(trim: bool, text: str) -> None:
    client = Client(TokenPieces.of([b"a", b"EN", b"D#", b"#b", b"late"], ()))
    client.take(step(opened=[opened(7, 3, 9, "END##", trim=trim)]))
    assert generate(client, [0, 1, 2], 3, 9) == []
    assert generate(client, [3, 4], 3, 9) == [Stop(3, 9, 4)]
    assert (client.text[7], client.ids[7]) == (text, [0, 1, 2, 3])
    assert client.finished[7] == Finished(7, Finish.STOP_STRING, "END##", "", "", 5, 4, 2)


def test_what_the_scheduler_sends_after_a_stop_string_is_dropped() -> None:
    """The scheduler is a step or two ahead: its rows, its own finish and an abort come late."""
    client = Client()
    client.take(step(opened=[opened(7, 1, 1, "!")]))
    assert generate(client, list(b"x!")) == [Stop(1, 1, 2)]
    late = step((1, 1, ord("y"), Finish.LENGTH), closed=[Closed(7, Finish.ABORT)])
    assert client.take(late) == []
    assert client.finished[7].finish == Finish.STOP_STRING
    assert (client.text[7], client.finished[7].completion_tokens) == ("x", 2)


def test_a_stop_string_completed_by_the_last_token_needs_no_word_to_the_scheduler() -> None:
    client = Client()
    client.take(step(opened=[opened(7, 1, 1, "!")]))
    assert client.take(step((1, 1, ord("!"), Finish.LENGTH))) == []
    assert client.finished[7].finish == Finish.STOP_STRING


@pytest.mark.parametrize(
    ("ids", "least", "text"),
    [
        (b"a!b!c", 0, "a"),
        (b"a!b!c", 1, "a"),
        (b"a!b!c", 2, "a!b"),
        (b"a!b!c", 3, "a!b"),
        (b"a!b!c", 4, None),
        (b"xENDy", 3, "x"),
        (b"xENDy", 4, None),
        (b"xENENDy", 4, "xEN"),
    ],
)
def test_a_stop_string_completed_by_token_min_new_tokens_or_before_is_none(
    ids: bytes, least: int, text: str | None
) -> None:
    """It is text like any other; one that only begins before counts."""
    client = Client()
    client.take(step(opened=[opened(7, 1, 1, "!", "END", least=least)]))
    stops = generate(client, list(ids))
    if text is None:
        assert (stops, client.text[7]) == ([], ids.decode())
        return
    completed = len(client.ids[7])
    assert completed > least
    assert stops == [Stop(1, 1, completed)]
    assert (client.text[7], client.finished[7].completion_tokens) == (text, completed)


@pytest.mark.parametrize("least", [2, 3])
def test_the_end_of_the_output_before_min_new_tokens_is_no_match(least: int) -> None:
    """Bytes that are no character show as one when the output ends, and may complete a stop string then."""
    client = Client()
    client.take(step(opened=[opened(7, 1, 1, "\ufffd", least=least)]))
    generate(client, [ord("a"), 0xE8, 0xAA])
    client.take(step(closed=[Closed(7, Finish.ABORT)]))
    want = (Finish.STOP_STRING, "a") if least == 2 else (Finish.ABORT, "a\ufffd")
    assert (client.finished[7].finish, client.text[7]) == want


def test_held_text_is_shown_when_the_output_ends() -> None:
    client = Client()
    client.take(step(opened=[opened(7, 1, 1, "END"), opened(8, 2, 1), opened(9, 3, 1)]))
    generate(client, list(b"aEN"))
    generate(client, [0xE8, 0xAA], 2)
    generate(client, [0xE8], 3)
    assert (client.text[7], client.text[8], client.text[9]) == ("a", "", "")
    client.take(step((1, 1, EOS_ID, Finish.STOP_TOKEN), (3, 1, ord("c"), Finish.LENGTH)))
    client.take(step(closed=[Closed(8, Finish.ABORT)]))
    assert (client.text[7], client.text[8], client.text[9]) == ("aEN", "\ufffd", "\ufffdc")
    assert client.finished[8].completion_tokens == 2


def test_rows_of_another_generation_are_dropped() -> None:
    client = Client()
    client.take(step(opened=[opened(7, 1, 2)]))
    client.take(step((1, 1, ord("a"), Finish.LENGTH), (2, 2, ord("b"), Finish.NONE)))
    assert (client.text, client.finished) == ({}, {})


def test_a_preempted_request_goes_on_in_another_slot() -> None:
    client = Client()
    client.take(step(opened=[opened(7, 1, 1, "END")]))
    generate(client, list(b"aEN"))
    # Its old slot goes to another request before it comes back.
    client.take(step((1, 2, ord("x"), Finish.NONE), opened=[opened(8, 1, 2)]))
    client.take(step((1, 2, ord("y"), Finish.NONE), opened=[opened(7, 4, 3)]))
    generate(client, [ord("z")])  # late, of its first life
    assert generate(client, [ord("D")], 4, 3) == [Stop(4, 3, 4)]
    assert (client.text, client.finished[7].completion_tokens) == ({7: "a", 8: "xy"}, 4)
    assert [uid for uid, *_ in client.opened] == [7, 8]


def test_a_request_that_comes_back_after_its_stop_string_is_stopped_again() -> None:
    """The first Stop named a slot that the scheduler had already taken away."""
    client = Client()
    client.take(step(opened=[opened(7, 1, 1, "!")]))
    assert generate(client, list(b"a!")) == [Stop(1, 1, 2)]
    assert client.take(step((2, 5, ord("b"), Finish.NONE), opened=[opened(7, 2, 5)])) == [Stop(2, 5, 2)]
    assert client.text[7] == "a"


def test_a_request_closed_without_a_slot() -> None:
    client = Client()
    client.take(step(closed=[Closed(7, Finish.FAILED, "no room", "capacity", 11), Closed(7, Finish.ABORT)]))
    assert client.finished[7] == Finished(7, Finish.FAILED, None, "no room", "capacity", 11, 0, 0)


def test_no_new_tokens_asked_for() -> None:
    client = Client()
    client.take(step(opened=[opened(7)], closed=[Closed(7, Finish.LENGTH)]))
    assert client.finished[7] == Finished(7, Finish.LENGTH, None, "", "", 5, 0, 2)


@given(
    st.lists(st.sampled_from([97, 98, 0xE8, 0xAA, 0x9E, 0xFF, EOS_ID]), max_size=20),
    st.lists(st.text("ab語\ufffd", min_size=1, max_size=3), max_size=3).map(tuple),
    st.integers(1, 4),
    st.integers(0, 6),
)
def test_the_result_does_not_depend_on_how_steps_are_batched(
    ids: list[int], stops: tuple[str, ...], rows_a_step: int, least: int
) -> None:
    def run(chunk: int) -> tuple[Any, ...]:
        client = Client()
        client.take(step(opened=[opened(7, 1, 1, *stops, least=least)]))
        for at in range(0, len(ids), chunk):
            client.take(step(*((1, 1, i, Finish.NONE) for i in ids[at : at + chunk])))
        client.take(step(closed=[Closed(7, Finish.LENGTH)]))
        return client.text.get(7), client.ids.get(7), client.finished[7]

    assert run(1) == run(rows_a_step)
