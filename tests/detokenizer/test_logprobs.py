"""Log probabilities go with the ids: cut where they are cut, dropped where they are dropped."""

from __future__ import annotations

from gapless.detokenizer.manager import DetokenizerManager
from gapless.runtime.core.logprobs import Logprobs
from gapless.runtime.core.messages import Closed, Finish, Opened, StepOutput, column, int32s
from gapless.runtime.tokenizer.byte_tokenizer import ByteTokenizer

Row = tuple[int, int, int]  # slot, generation, id
Scored = tuple[int, int, bool, Logprobs]  # slot, generation, whether of the prompt


def opened(uid: int, slot: int, *stop: str) -> Opened:
    return Opened(uid, slot, 1, 5, 2, stop, True, False)


def named(name: str) -> Logprobs:
    return Logprobs(name.encode(), b"", b"", b"")


def step(
    rows: list[Row],
    logprobs: list[Scored],
    opens: list[Opened] | None = None,
    closed: list[Closed] | None = None,
) -> StepOutput:
    slots, generations, ids = zip(*rows, strict=True) if rows else ((), (), ())
    columns = (column(slots, "<i4"), column(generations, "<i4"), column(ids, "<i4"))
    return StepOutput(opens or [], *columns, bytes(len(rows)), closed or [], logprobs)


def passed(manager: DetokenizerManager, message: StepOutput) -> list[tuple[int, bool, str]]:
    output, _ = manager.handle(message)
    names = [(uid, of_prompt, found.values.decode()) for uid, of_prompt, found in output.logprobs]
    for uid in {uid for uid, of_prompt, _ in names if not of_prompt}:
        uids = [int(u) for u in memoryview(output.uids).cast("q")]
        counts = int32s(output.counts).tolist()
        gained = sum(count for u, count in zip(uids, counts, strict=True) if u == uid)
        assert gained == sum(name[:2] == (uid, False) for name in names), "one for each id"
    return names


def test_they_reach_their_request() -> None:
    manager = DetokenizerManager(ByteTokenizer().pieces)
    opens = [opened(7, 1), opened(8, 2), opened(9, 3)]
    first = step([], [(2, 1, True, named("p"))], opens)
    assert passed(manager, first) == [(8, True, "p")]
    rows = [(1, 1, 65), (2, 1, 66), (3, 1, 67)]
    found = [(3, 1, False, named("c")), (2, 1, True, named("q")), (2, 1, False, named("b"))]
    assert passed(manager, step(rows, found)) == [(8, True, "q"), (8, False, "b"), (9, False, "c")]


def test_a_stop_string_cuts_them_after_the_id_that_completes_it() -> None:
    """Also where one message has several ids of the request, and where more come before the scheduler knows."""
    manager = DetokenizerManager(ByteTokenizer().pieces)
    rows = [(1, 1, i) for i in b"xENDy"]
    found = [(1, 1, False, named(c)) for c in "xENDy"]
    names = passed(manager, step(rows, found, [opened(7, 1, "END")]))
    assert names == [(7, False, c) for c in "xEND"]
    assert passed(manager, step([(1, 1, 65)], [(1, 1, False, named("A")), (1, 1, True, named("p"))])) == []


def test_those_of_a_former_owner_of_the_slot_are_dropped() -> None:
    manager = DetokenizerManager(ByteTokenizer().pieces)
    manager.handle(step([], [], [opened(7, 1)]))
    manager.handle(step([], [], [], [Closed(7, Finish.ABORT)]))
    manager.handle(step([], [], [Opened(8, 1, 2, 5, 2, (), True, False)]))
    rows = [(1, 1, 65), (1, 2, 66)]
    found = [(1, 1, False, named("old")), (1, 1, True, named("old")), (1, 2, False, named("new"))]
    assert passed(manager, step(rows, found)) == [(8, False, "new")]
