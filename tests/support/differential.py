"""The differential runner: drives the scheduler with the toy model through a script, with no clock and no sockets."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from gapless.overlap.device import Worker
from gapless.overlap.toy_worker import ToyWorker
from gapless.runtime.core.config import ServerConfig
from gapless.runtime.core.logprobs import Logprobs
from gapless.runtime.core.messages import (
    Abort,
    Finish,
    Flush,
    Flushed,
    StepOutput,
    Stop,
    Submit,
    column,
    int32s,
    uint8s,
)
from gapless.runtime.core.plan import Plan
from gapless.runtime.core.sampling import SamplingParams
from gapless.runtime.model.toy import ToyKnobs, toy_entries, toy_output
from gapless.runtime.scheduler.grammar import MakeGrammar, unconstrained
from gapless.runtime.scheduler.scheduler import Scheduler

# The ways in which the loop can run, as options.
MODES: dict[str, dict[str, Any]] = {
    "overlap": {},
    "no-overlap": {"disable_overlap_schedule": True},
    "multi-step": {"num_scheduler_steps": 4},
}


@dataclass
class Seen:
    """What the detokenizer would know of a request."""

    ids: list[int] = field(default_factory=list)
    finish: Finish = Finish.NONE
    message: str = ""
    slot: int = 0
    generation: int = 0
    cached_tokens: int = -1
    forwards: int = 0  # launched rows, decode or chunk
    decodes: int = 0  # those past the prompt
    logprobs: list[tuple[bool, Logprobs]] = field(default_factory=list)  # whether of the prompt


class ToyLaunch:
    """A step that runs when it is asked to, in its two parts."""

    def __init__(self, worker: Worker, plan: Plan) -> None:
        self.worker, self.plan = worker, plan
        self.ids: np.ndarray | None = None
        self.late_ids: np.ndarray | None = None
        self.logprobs: list[Logprobs] = []
        self.late_logprobs: list[Logprobs] = []

    def sample_late(self) -> None:
        if self.late_ids is None:
            self.late_ids = self.worker.sample_late(self.plan)
            if self.plan.late_logprobs:
                self.late_logprobs = self.worker.take_logprobs(self.plan.late_logprobs)

    def run(self) -> None:
        self.sample_late()
        if self.ids is None:
            self.ids = self.worker.run(self.plan)
            if self.plan.logprobs:
                self.logprobs = self.worker.take_logprobs(self.plan.logprobs)


class Runner:
    """`late` runs each plan as late as the loop allows, so that whatever was changed after the launch would show."""

    def __init__(
        self,
        config: ServerConfig,
        *,
        late: bool = True,
        worker: Worker | None = None,
        make_grammar: MakeGrammar = unconstrained,
    ) -> None:
        self.lag, self.steps = 0 if config.disable_overlap_schedule else 1, config.num_scheduler_steps
        self.knobs = ToyKnobs.parse(config.toy)
        self.worker = worker or ToyWorker(config)
        self.scheduler = Scheduler(config, self.worker.load(), make_grammar)
        self.late = late
        self.flying: deque[ToyLaunch] = deque()
        self.late_ready: Callable[[], bool] = lambda: True
        self.seen: dict[int, Seen] = {}
        self.plans: list[Plan] = []
        self.preemptions: dict[int, int] = {}  # by uid

    def submit(
        self, uid: int, prompt: list[int], max_new_tokens: int, stop_ids: tuple[int, ...] = (), **more
    ) -> None:
        params = SamplingParams(max_new_tokens=max_new_tokens, temperature=0.0)
        self.seen[uid] = Seen()
        self.scheduler.handle([Submit(uid, column(prompt, "<i4"), params, stop_ids, seed=uid, **more)])
        self.collect()

    def abort(self, uid: int) -> None:
        self.scheduler.handle([Abort(uid)])

    def stop(self, uid: int, output_len: int) -> None:
        """A stop string was completed by output token `output_len`, as the detokenizer would say it."""
        seen = self.seen[uid]
        self.scheduler.handle([Stop(seen.slot, seen.generation, output_len)])

    def flush(self) -> Flushed:
        """The answer, which must be yes if and only if no request is alive."""
        running, waiting, _ = self.scheduler.counts
        self.scheduler.handle([Flush(7)])
        (answer,) = self.scheduler.take_flushed()
        assert (answer.number, answer.running, answer.waiting) == (7, running, waiting)
        assert answer.done == (running + waiting == 0)
        return answer

    def turn(self) -> bool:
        """One pass of the loop; False when it did nothing."""
        self.take_late()
        plan, launched = self.scheduler.compose(), 0
        while plan is not None and launched < self.steps:
            self.plans.append(plan)
            self._count_forwards(plan)
            self.flying.append(ToyLaunch(self.worker, plan))
            if not self.late:
                self.flying[-1].run()
            launched += 1
            plan = self.scheduler.compose_more() if launched < self.steps else None
        keep = self.lag * self.steps if launched else max(len(self.flying) - 1, 0)
        retired = len(self.flying) > keep
        while len(self.flying) > keep:
            launch = self.flying.popleft()
            launch.run()
            found = launch.logprobs, launch.late_logprobs
            self.scheduler.retire(launch.plan, launch.ids, launch.late_ids, *found)
            self.collect()
        self.collect()
        self.check_tree()
        return retired or launched > 0

    def check_tree(self) -> None:
        """Each cached page holds the KV of its ids at their positions: nothing enters before it is computed."""
        if not isinstance(self.worker, ToyWorker):
            return
        size = self.scheduler.batch.cache.page_size
        for node in self.scheduler.batch.cache.nodes():
            places = (node.pages.astype(np.int64)[:, None] * size + np.arange(size)).ravel()
            held = self.worker.model.entries(places)
            want = toy_entries(
                np.frombuffer(node.key, np.int32), np.arange(node.begin * size, node.end * size)
            )
            assert (held == want).all(), "the tree holds a page that was not computed"

    def take_late(self) -> None:
        """Late samples of the oldest step in flight, if the device has come so far."""
        if self.flying and (not self.late or self.late_ready()):
            launch = self.flying[0]
            launch.sample_late()
            self.scheduler.take_late(launch.plan, launch.late_ids, launch.late_logprobs)
            self.collect()

    def finish(self, limit: int = 20_000) -> None:
        """Turns until all is done; then the accounting must be exact."""
        for _ in range(limit):
            if not self.turn() and self.scheduler.is_idle:
                break
        else:
            raise AssertionError("the scheduler does not come to rest")
        self.scheduler.check_idle()
        assert all(seen.finish for seen in self.seen.values()), "a request got no terminal message"

    def collect(self) -> None:
        output = self.scheduler.take_output()
        if output is not None:
            self._collect(output)

    def expected(self, prompt: list[int], count: int, stop_ids: tuple[int, ...] = ()) -> list[int]:
        """The closed form: ids up to and with the first stop id."""
        ids = toy_output(self.knobs, prompt, count)
        stops = [index for index, token in enumerate(ids) if token in stop_ids]
        return ids[: stops[0] + 1] if stops else ids

    def _count_forwards(self, plan: Plan) -> None:
        for row, slot in enumerate(plan.slots.tolist()):
            request = self.scheduler.batch.request(slot)
            seen = self.seen[request.submit.uid]
            seen.forwards += 1
            seen.decodes += row < len(plan.slots) - plan.chunks
            self.preemptions[request.submit.uid] = request.preemptions

    def _collect(self, output: StepOutput) -> None:
        for opened in output.opened:
            seen = self.seen[opened.uid]
            assert not seen.generation and not seen.slot, "opened twice"
            seen.slot, seen.generation, seen.cached_tokens = (
                opened.slot,
                opened.generation,
                opened.cached_tokens,
            )
        names = {(seen.slot, seen.generation): seen for seen in self.seen.values() if seen.slot}
        columns = (
            int32s(output.slots),
            int32s(output.generations),
            int32s(output.ids),
            uint8s(output.finish),
        )
        for slot, generation, of_prompt, logprobs in output.logprobs:
            assert not names[slot, generation].finish, "a log probability after the end"
            names[slot, generation].logprobs.append((of_prompt, logprobs))
        for slot, generation, token, finish in zip(*(c.tolist() for c in columns), strict=True):
            seen = names[slot, generation]
            assert not seen.finish, "an id after the end"
            seen.ids.append(token)
            seen.finish = Finish(finish)
        for closed in output.closed:
            seen = self.seen[closed.uid]
            assert not seen.finish, "a second end"
            seen.finish, seen.message = Finish(closed.finish), closed.message
