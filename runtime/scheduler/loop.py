"""The loop that keeps the device busy.

One loop with two numbers. `lag` 0 looks at the results of a composition before the next one; lag 1 launches the next
composition first, so that the device works while the CPU does. `steps` k launches k steps from each composition
(multi-step scheduling, vLLM 0.6): an arrival waits for at most (lag + 1) k steps, and the host composes once in k.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterator
from typing import Protocol

from gapless.overlap.device import Device, Launch
from gapless.runtime.core.errors import InternalError
from gapless.runtime.core.messages import Heartbeat, ToDetokenizer, ToScheduler
from gapless.runtime.core.plan import Plan
from gapless.runtime.core.trace import Recorder
from gapless.runtime.scheduler.scheduler import Scheduler

HEARTBEAT_S = 0.25
STALLED_TURNS = 1000  # in which there was work and nothing was launched or in flight
LATE_WAIT_S = 0.005  # for late samples of a step that is about to begin; the device is busy meanwhile


log = logging.getLogger("gapless.scheduler")


class Inbox(Protocol):
    def wait(self, timeout_ms: int) -> bool: ...
    def drain(self) -> list[ToScheduler]: ...


class Outbox(Protocol):
    def send(self, message: ToDetokenizer) -> None: ...


class Loop:
    """Ties a scheduler to its device and its two channels."""

    def __init__(
        self,
        scheduler: Scheduler,
        device: Device,
        inbox: Inbox,
        outbox: Outbox,
        *,
        lag: int,
        steps: int,
        watchdog_s: float,
        recorder: Recorder | None = None,
    ) -> None:
        self.scheduler = scheduler
        self._device, self._inbox, self._outbox = device, inbox, outbox
        self._lag, self._steps, self._watchdog_s = lag, steps, watchdog_s
        self.recorder = recorder
        if recorder is not None:
            scheduler.on_composed = lambda: self._mark("compose")
        self._flying: deque[Launch] = deque()
        self._last_beat = 0.0
        self._launches = 0
        self._audited = 0  # launches up to the last audit
        self._violations = 0
        self._idle_turns = 0
        self._now = time.perf_counter()

    def run(self) -> None:
        """Never returns; raises InternalError when the device failed."""
        while True:
            self.turn()

    def turn(self) -> None:
        """One pass: receive, compose and launch, retire, send."""
        if not self._flying and self.scheduler.is_idle:
            self._audit()
            self._inbox.wait(int(HEARTBEAT_S * 1000))
            self._mark("idle")
        self.scheduler.handle(self._inbox.drain())
        self._mark("receive")
        while self.scheduler.reloads:
            self._reload(self.scheduler.reloads[0].model_path)
        self._take_late()
        launched = self._launch_steps()
        self._check_progress(launched)
        keep = self._lag * self._steps if launched else 0
        while len(self._flying) > keep:
            self._retire(self._flying.popleft())
            self._send()
            if not launched:
                break  # nothing more to launch until this is decided; perhaps there is now
        self._send()
        self._beat()

    def _audit(self) -> None:
        """At rest all must be back. A server goes on where it is not, but says so and counts it."""
        if self._launches != self._audited:
            self._audited = self._launches
            if problem := self.scheduler.audit():
                self._violations += 1
                log.error("accounting: %s", problem)

    def _reload(self, model_path: str) -> None:
        """Has other weights loaded. No request runs, but a step that was launched for nothing may; beats go on."""
        while self._flying:
            self._retire(self._flying.popleft())
        reload = self._device.reload(model_path)
        while not reload.wait(HEARTBEAT_S):
            self._beat()
        self.scheduler.reloaded(reload.error)

    def _check_progress(self, launched: int) -> None:
        """A scheduler that has work and does none would spin for ever: better an end that says so."""
        resting = launched or self._flying or self.scheduler.is_idle
        self._idle_turns = 0 if resting else self._idle_turns + 1
        if self._idle_turns > STALLED_TURNS:
            raise InternalError(
                f"the scheduler is stalled: {self.scheduler.counts} running, waiting, tokens in use"
            )

    def _launch_steps(self) -> int:
        """Composes, and launches each plan as soon as it is there."""
        before = self._launches
        for plan in self._plans():
            self._mark("plan")
            self._flying.append(self._device.launch(plan))
            self._launches += 1
            self._mark("launch")
        return self._launches - before

    def _plans(self) -> Iterator[Plan]:
        plan = self.scheduler.compose()
        for _ in range(self._steps - 1):
            if plan is None:
                return
            yield plan
            plan = self.scheduler.compose_more()
        if plan is not None:
            yield plan

    def _take_late(self) -> None:
        """Late samples of the steps in flight, so that their rows' next masks can be made."""
        for launch in self._flying:
            if launch.plan.late.slots.size and launch.wait_late(LATE_WAIT_S):
                logprobs = launch.late_logprobs() if launch.plan.late_logprobs else ()
                self.scheduler.take_late(launch.plan, launch.late_ids(), logprobs)
                self._mark("late")

    def _retire(self, launch: Launch) -> None:
        while not launch.wait(HEARTBEAT_S):
            age = time.monotonic() - launch.launched_at
            if age > self._watchdog_s:
                raise InternalError(
                    f"device step {launch.plan.step} has hung for {age:.0f} s (--watchdog-timeout)"
                )
            self._beat(age)
        self._mark("wait")
        plan = launch.plan
        logprobs = launch.logprobs() if plan.logprobs else ()
        late_logprobs = launch.late_logprobs() if plan.late_logprobs else ()
        self.scheduler.retire(plan, launch.ids(), launch.late_ids(), logprobs, late_logprobs)
        self._mark("retire")
        if self.recorder is not None:
            self.recorder.step(launch.plan.step, launch.started, launch.ended)

    def _send(self) -> None:
        output = self.scheduler.take_output()
        if output is not None:
            self._outbox.send(output)
            self._mark("send")
        for flushed in self.scheduler.take_flushed():
            self._outbox.send(flushed)

    def _beat(self, launch_age: float = 0.0) -> None:
        now = time.monotonic()
        if now - self._last_beat < HEARTBEAT_S:
            return
        self._last_beat = now
        running, waiting, used = self.scheduler.counts
        preemptions = self.scheduler.admission.preemption.count
        self._outbox.send(
            Heartbeat(now, launch_age, running, waiting, used, self._launches, self._violations, preemptions)
        )

    def _mark(self, phase: str) -> None:
        """The time since the last mark belongs to `phase`."""
        if self.recorder is not None:
            before, self._now = self._now, time.perf_counter()
            self.recorder.phase(phase, before, self._now)
