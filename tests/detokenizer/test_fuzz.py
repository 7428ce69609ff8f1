"""Random ids, stop strings and cuts into messages, from the scheduler's rows to what a client reads.

Requests run beside each other, some of them preempted half-way, and rows go on to come after a stop string. A scene is
drawn from its number alone, so a failure, which names it, can be run by itself.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

import pytest
from detokenizer_cases import Case, Family, draw, right
from tokenizer_files import byte_level, save

from gapless.detokenizer.manager import DetokenizerManager
from gapless.runtime.core.messages import Closed, Finish, Opened, StepOutput, TextOutput, column, int64s
from gapless.runtime.core.model_path import resolve_model_path
from gapless.runtime.core.sampling import SamplingParams
from gapless.runtime.tokenizer.byte_tokenizer import ByteTokenizer
from gapless.runtime.tokenizer.load import load_pieces
from gapless.tokenizer_manager.answer import next_chunk, whole_answer
from gapless.tokenizer_manager.schema import Prompt
from gapless.tokenizer_manager.states import Registry, RequestState

TOGETHER = 8  # requests at once
EVERY_DAY, AT_LENGTH = 800, 100_000  # requests of each tokenizer
Row = tuple[int, int, int, Finish]  # slot, generation, id, finish


@pytest.fixture(scope="module", params=["bytes", "demo", "byte-level BPE"])
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Family]:
    """The demo model's is SentencePiece with byte fallback, from GGUF."""
    if request.param == "bytes":
        tokenizer = ByteTokenizer()
        yield Family(tokenizer.pieces, tokenizer.decode)
        return
    if request.param == "demo":
        pieces = load_pieces(str(resolve_model_path("demo").path))
        yield Family(pieces, pieces.decode)
        return
    root = tmp_path_factory.mktemp("tokenizer")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GAPLESS_CACHE_DIR", str(root / "cache"))
        library = byte_level(["the theory of 語 and 中文, “quoted” 👩‍👩‍👧 END##"] * 20)
        pieces = load_pieces(save(root, library))
    yield Family(pieces, lambda ids, skip: library.decode(ids, skip_special_tokens=skip))


class Client:
    """One request on its way: what comes for it, and what two clients read of it, one of them a stream."""

    def __init__(self, case: Case, family: Family, front: Front, incremental: bool) -> None:
        self.case, self.right, self.family = case, right(case, family), family
        self.stream, self.whole = front.open()
        self.uid, self.incremental = self.stream.uid, incremental
        self.slot = self.generation = self.sent = 0
        self.deltas = self.chunks = ""
        self.told: list[int] = []  # the lengths in the scheduler's Stop messages

    def opened(self) -> Opened:
        case, place = self.case, (self.slot, self.generation)
        return Opened(self.uid, *place, 3, 0, case.stops, case.skip_special, case.no_stop_trim, case.least)

    def rows(self, count: int) -> Iterator[Row]:
        """Of the next `count` ids, where there are so many."""
        for token in self.case.ids[self.sent : self.sent + count]:
            self.sent += 1
            ends = self.sent == len(self.case.ids) and self.case.end != Finish.ABORT
            yield self.slot, self.generation, token, self.case.end if ends else Finish.NONE

    def read(self) -> None:
        """The next event of the stream."""
        text = next_chunk(self.stream, self.incremental)["text"]
        if self.incremental:
            self.chunks += text
        else:
            assert text.startswith(self.chunks), "text that was sent was changed"
            self.chunks = text

    def check(self) -> None:
        """After each message."""
        if self.whole.finished is not None or not self.sent:
            return
        assert self.deltas == self.right.shown[self.sent - 1]
        if not self.case.stops:
            data = self.case.data(self.family, self.sent)
            texts = [data[: len(data) - held].decode(errors="replace") for held in range(4)]
            assert self.deltas in texts, "more than 3 bytes are held"

    def check_end(self) -> None:
        self.read()
        case, finished, want = self.case, self.whole.finished, self.right
        assert finished is not None
        answer = whole_answer(self.whole)
        assert self.deltas == self.chunks == answer["text"] == want.text
        assert answer["output_ids"] == case.ids[: want.tokens]
        assert (finished.finish, finished.completion_tokens) == (want.finish, want.tokens)
        by_string = want.finish == Finish.STOP_STRING
        if by_string:
            assert finished.matched == want.stop
        elif case.end != Finish.STOP_TOKEN or case.no_stop_trim:
            assert want.text == self.family.decode(case.ids, case.skip_special)
        if case.least == 0 and not (by_string and case.no_stop_trim):
            assert not any(stop in want.text for stop in case.stops), "a stop string is visible"
        assert set(self.told) <= {want.tokens}
        assert self.told or not (by_string and want.tokens < len(case.ids)), "the scheduler goes on"


class Front:
    """Twice what the HTTP process keeps of requests: one is read while they run, the other when they have ended."""

    def __init__(self) -> None:
        self.registries = Registry(lambda _: None, 99), Registry(lambda _: None, 99)
        self.names = map(str, itertools.count())

    def open(self) -> list[RequestState]:
        name = next(self.names)
        prompt = Prompt("", None, SamplingParams(), name, (name,))
        calls = [registry.open([prompt], interval=1) for registry in self.registries]
        return [call.states[0] for call in calls]

    def apply(self, output: TextOutput) -> None:
        for registry in self.registries:
            registry.apply(output)

    def close(self, client: Client) -> None:
        for registry, state in zip(self.registries, (client.stream, client.whole), strict=True):
            registry.close(state.call)


class Scene:
    """Requests beside each other, until all have ended and all that comes late has come."""

    def __init__(self, family: Family, seed: str, manager: DetokenizerManager, front: Front) -> None:
        self.rng, self.manager, self.front = random.Random(seed), manager, front
        cases = [draw(self.rng, family) for _ in range(TOGETHER)]
        clients = [Client(case, family, front, self.rng.random() < 0.5) for case in cases]
        self.clients = {client.uid: client for client in clients}
        self.slots = self.rng.sample(range(1, 2 * TOGETHER + 1), 2 * TOGETHER)  # the free ones
        self.generations = itertools.count(1)

    def run(self) -> None:
        going = list(self.clients.values())
        while going:
            opened: list[Opened] = []
            closed: list[Closed] = []
            rows: list[list[Row]] = []
            freed: list[int] = []
            for client in self.rng.sample(going, self.rng.randint(1, len(going))):
                if client.slot == 0 or self.rng.random() < 0.05:  # it comes, or comes back from preemption
                    freed += [client.slot] * bool(client.slot)
                    client.slot, client.generation = self.slots.pop(), next(self.generations)
                    opened.append(client.opened())
                rows.append(list(client.rows(self.rng.choice((0, 1, 1, 1, 2, 4, 99)))))
                aborted = client.case.end == Finish.ABORT
                if client.sent == len(client.case.ids) and not (aborted and self.rng.random() < 0.5):
                    going.remove(client)
                    freed.append(client.slot)
                    if aborted or self.rng.random() < 0.2:  # an abort may meet another end
                        closed.append(Closed(client.uid, Finish.ABORT))
            self.step(opened, self.interleaved(rows), closed)
            self.slots[:0] = freed
        for client in self.clients.values():
            client.check_end()
            self.front.close(client)
        assert len(self.manager) == 0

    def interleaved(self, rows: list[list[Row]]) -> list[Row]:
        """In any order that keeps each request's own."""
        order = [i for i, own in enumerate(rows) for _ in own]
        self.rng.shuffle(order)
        queues = [iter(own) for own in rows]
        return [next(queues[i]) for i in order]

    def step(self, opened: list[Opened], rows: list[Row], closed: list[Closed]) -> None:
        slots, generations, ids, finishes = zip(*rows, strict=True) if rows else ((), (), (), ())
        columns = [column(values, "<i4") for values in (slots, generations, ids)]
        output, stops = self.manager.handle(StepOutput(opened, *columns, column(finishes, "u1"), closed))
        for uid, text in zip(int64s(output.uids).tolist(), output.texts, strict=True):
            self.clients[uid].deltas += text
        self.front.apply(output)
        named = {(client.slot, client.generation): client for client in self.clients.values()}
        for stop in stops:
            named[stop.slot, stop.generation].told.append(stop.output_len)
        for client in self.clients.values():
            client.check()
            if self.rng.random() < 0.4:
                client.read()


def fuzz(family: Family, requests: int) -> None:
    manager, front = DetokenizerManager(family.pieces), Front()
    for number in range(requests // TOGETHER):
        try:
            Scene(family, f"scene {number}", manager, front).run()
        except Exception as error:
            error.add_note(f"in scene {number}")
            raise


def test_any_ids_stops_and_messages(family: Family) -> None:
    fuzz(family, EVERY_DAY)


@pytest.mark.slow
def test_any_ids_stops_and_messages_at_length(family: Family) -> None:
    fuzz(family, AT_LENGTH)
