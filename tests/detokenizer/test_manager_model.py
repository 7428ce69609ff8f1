"""The manager against a naive model, under any order of openings, preemptions, late rows and repeated closes."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from gapless.detokenizer.manager import DetokenizerManager
from gapless.runtime.core.messages import (
    Closed,
    Finish,
    Opened,
    StepOutput,
    Stop,
    column,
    int32s,
    int64s,
)
from gapless.runtime.tokenizer.byte_tokenizer import ByteTokenizer

SLOTS = st.integers(1, 3)
STOPS = st.lists(st.text("ab", min_size=1, max_size=4), max_size=2).map(tuple)


@dataclass
class Model:
    """One request as a list of the letters that it was given."""

    stops: tuple[str, ...]
    min_new_tokens: int = 0
    text: str = ""
    finish: Finish = Finish.NONE

    def matched(self) -> str | None:
        if len(self.text) <= self.min_new_tokens:
            return None
        ends = [s for s in self.stops if self.text.endswith(s)]
        return max(ends, key=len) if ends else None

    def shown(self) -> str:
        """What a client may have seen: nothing that could still become a stop string."""
        if self.finish == Finish.STOP_STRING:
            return self.text.removesuffix(self.matched() or "")
        if self.finish != Finish.NONE:
            return self.text
        starts = (s[:n] for s in self.stops for n in range(len(s)))
        held = max((len(start) for start in starts if self.text.endswith(start)), default=0)
        return self.text[: len(self.text) - held]


@dataclass
class Seen:
    text: str = ""
    ids: list[int] = field(default_factory=list)
    finishes: list[int] = field(default_factory=list)


class ManagerAgainstModel(RuleBasedStateMachine):
    @initialize()
    def start(self) -> None:
        self.manager = DetokenizerManager(ByteTokenizer().pieces)
        self.models: dict[int, Model] = {}
        self.seen: dict[int, Seen] = {}
        self.bound: dict[int, int] = {}  # slot to uid
        self.generation = dict.fromkeys((1, 2, 3), 0)  # each slot's own, so that numbers repeat between slots

    def feed(self, step: StepOutput) -> list[Stop]:
        output, stops = self.manager.handle(step)
        ids, at = int32s(output.ids).tolist(), 0
        counts = int32s(output.counts).tolist()
        for uid, text, count in zip(int64s(output.uids).tolist(), output.texts, counts, strict=True):
            seen = self.seen[uid]
            seen.text += text
            seen.ids += ids[at : at + count]
            at += count
        for finished in output.finished:
            self.seen[finished.uid].finishes.append(finished.finish)
            assert finished.completion_tokens == len(self.seen[finished.uid].ids)
        return stops

    def open(self, uid: int, slot: int) -> list[Stop]:
        self.generation[slot] += 1
        self.bound = {s: u for s, u in self.bound.items() if u != uid}
        self.bound[slot] = uid
        model = self.models[uid]
        opened = Opened(
            uid, slot, self.generation[slot], 1, 0, model.stops, True, False, model.min_new_tokens
        )
        return self.feed(StepOutput([opened], b"", b"", b"", b"", []))

    @rule(slot=SLOTS, stops=STOPS, min_new_tokens=st.sampled_from([0, 0, 3, 6]))
    def open_new(self, slot: int, stops: tuple[str, ...], min_new_tokens: int) -> None:
        uid = len(self.models)
        self.models[uid], self.seen[uid] = Model(stops, min_new_tokens), Seen()
        assert self.open(uid, slot) == []

    @rule(slot=SLOTS, data=st.data())
    def open_again(self, slot: int, data: st.DataObject) -> None:
        if not self.models:
            return
        uid = data.draw(st.sampled_from(sorted(self.models)))
        done = self.models[uid].finish != Finish.NONE
        want = [Stop(slot, self.generation[slot] + 1, len(self.seen[uid].ids))] if done else []
        assert self.open(uid, slot) == want

    @rule(
        slot=SLOTS,
        letters=st.text("ab", min_size=1, max_size=3),
        late=st.booleans(),
        end=st.sampled_from([Finish.NONE, Finish.NONE, Finish.LENGTH]),
    )
    def rows(self, slot: int, letters: str, late: bool, end: Finish) -> None:
        uid, generation = self.bound.get(slot, -1), self.generation[slot]
        finishes = [Finish.NONE] * (len(letters) - 1) + [end]
        stops = self.feed(
            StepOutput(
                [],
                column([slot] * len(letters), "<i4"),
                column([generation - late] * len(letters), "<i4"),
                column([ord(c) for c in letters], "<i4"),
                column(finishes, "u1"),
                [],
            )
        )
        want = []
        if uid >= 0 and not late:
            for letter, finish in zip(letters, finishes, strict=True):
                model = self.models[uid]
                if model.finish != Finish.NONE:
                    continue
                model.text += letter
                model.finish = Finish.STOP_STRING if model.matched() else finish
                if model.matched() and finish == Finish.NONE:
                    want.append(Stop(slot, generation, len(model.text)))
        assert stops == want

    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        if not self.models:
            return
        uid = data.draw(st.sampled_from(sorted(self.models)))
        self.feed(StepOutput([], b"", b"", b"", b"", [Closed(uid, Finish.ABORT)]))
        if self.models[uid].finish == Finish.NONE:
            self.models[uid].finish = Finish.ABORT

    @rule()
    def close_without_a_slot_twice(self) -> None:
        uid = len(self.models)
        self.models[uid], self.seen[uid] = Model((), finish=Finish.ABORT), Seen()
        self.feed(StepOutput([], b"", b"", b"", b"", [Closed(uid, Finish.ABORT)] * 2))

    @invariant()
    def clients_saw_what_the_model_says(self) -> None:
        for uid, model in self.models.items():
            seen = self.seen[uid]
            assert seen.text == model.shown()
            assert seen.ids == list(model.text.encode())
            assert seen.finishes == ([model.finish] if model.finish != Finish.NONE else [])

    @invariant()
    def only_live_requests_are_kept(self) -> None:
        assert len(self.manager) == sum(m.finish == Finish.NONE for m in self.models.values())


TestManagerAgainstModel = ManagerAgainstModel.TestCase
TestManagerAgainstModel.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)
