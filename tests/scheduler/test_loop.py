"""The loop: what it launches when, and what it says of itself; with a device that runs when it is told to."""

from __future__ import annotations

from typing import Any

import pytest

from gapless.overlap.device import CPULaunch
from gapless.overlap.toy_worker import ToyWorker
from gapless.runtime.core.config import ServerConfig
from gapless.runtime.core.errors import InternalError
from gapless.runtime.core.messages import Heartbeat, StepOutput, Submit, column
from gapless.runtime.core.plan import Plan
from gapless.runtime.core.sampling import SamplingParams
from gapless.runtime.scheduler.loop import Loop
from gapless.runtime.scheduler.scheduler import Scheduler


class Recording:
    """A device that runs each launch when it is waited for, both channels, and a log of what happened in order."""

    def __init__(self, worker: ToyWorker, hangs: bool = False) -> None:
        self.worker, self.hangs, self.log, self.sent, self.inbox = worker, hangs, [], [], []

    def launch(self, plan: Plan) -> CPULaunch:
        launch = CPULaunch(plan)
        self.log.append(f"launch {plan.step}")

        def wait(timeout: float) -> bool:
            self.log.append(f"wait {plan.step}")
            if not self.hangs:
                launch.run(self.worker)
            return not self.hangs

        launch.wait = wait  # type: ignore[method-assign]
        return launch

    def wait(self, timeout_ms: int) -> bool:
        self.log.append("idle")
        return bool(self.inbox)

    def drain(self) -> list[Any]:
        messages, self.inbox = self.inbox, []
        return messages

    def send(self, message: Any) -> None:
        self.sent.append(message)


def make(
    lag: int = 1, steps: int = 1, *, hangs: bool = False, watchdog_s: float = 60
) -> tuple[Loop, Recording]:
    config = ServerConfig(model_path="toy", max_running_requests=4)
    worker = ToyWorker(config)
    scheduler = Scheduler(config, worker.load())
    all_in_one = Recording(worker, hangs)
    loop = Loop(scheduler, all_in_one, all_in_one, all_in_one, lag=lag, steps=steps, watchdog_s=watchdog_s)
    return loop, all_in_one


def submit(count: int) -> Submit:
    return Submit(
        1, column([1, 2, 3], "<i4"), SamplingParams(max_new_tokens=count, temperature=0.0), (), seed=1
    )


@pytest.mark.parametrize(
    ("lag", "steps", "order"),
    [
        (0, 1, "launch 1, wait 1, launch 2, wait 2, launch 3, wait 3"),
        (1, 1, "launch 1, launch 2, wait 1, launch 3, wait 2, wait 3"),
        (0, 2, "launch 1, launch 2, wait 1, wait 2, launch 3, wait 3"),
        (1, 2, "launch 1, launch 2, launch 3, wait 1, wait 2, wait 3"),
    ],
)
def test_with_lag_the_next_composition_is_launched_before_the_last_is_looked_at(lag, steps, order):
    loop, device = make(lag, steps)
    device.inbox = [submit(3)]
    while not loop.scheduler.is_idle or device.inbox:
        loop.turn()
    steps_seen = [entry for entry in device.log if entry != "idle"]
    first_waits = [entry for i, entry in enumerate(steps_seen) if entry not in steps_seen[:i]]
    assert ", ".join(first_waits) == order
    assert sum(len(message.ids) // 4 for message in device.sent if isinstance(message, StepOutput)) == 3


def test_an_idle_loop_waits_for_its_inbox_and_beats():
    loop, device = make()
    loop.turn()
    assert device.log == ["idle"]
    assert [type(message) for message in device.sent] == [Heartbeat]


def test_a_step_that_hangs_is_fatal_and_beats_tell_its_age():
    loop, device = make(hangs=True, watchdog_s=0.0)
    device.inbox = [submit(2)]
    with pytest.raises(InternalError, match="hung"):
        for _ in range(3):
            loop.turn()


def test_work_without_progress_is_fatal():
    loop, device = make()
    loop.scheduler.compose = lambda: None  # type: ignore[method-assign]
    device.inbox = [submit(2)]
    loop.turn()
    with pytest.raises(InternalError, match="stalled"):
        for _ in range(2000):
            loop.turn()
