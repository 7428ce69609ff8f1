"""A device that takes time but no work: a time line, no thread.

A launch starts at the later of now and the end of the last one. Waiting for its event sleeps until shortly before that
time and spins the rest, as CUDA's own wait does. What the simulation itself costs (the cost model, the ids) is paid
inside the wait, when the host has nothing else to do.
"""

from __future__ import annotations

import dataclasses
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from gapless.overlap.cost_model import PROFILES, CostModel, move_costs, shape_named
from gapless.overlap.device import Ids, Worker
from gapless.overlap.toy_worker import ToyWorker
from gapless.runtime.core.config import ServerConfig
from gapless.runtime.core.errors import ConfigError, GaplessError, InternalError, ModelLoadError
from gapless.runtime.core.logprobs import LogprobRow, Logprobs
from gapless.runtime.core.plan import DeviceInfo, MoveCosts, Plan
from gapless.runtime.model.toy import ToyKnobs

SPIN_S = 200e-6  # more than what a sleep usually oversleeps
_NO_IDS: Ids = np.empty(0, np.int64)


class Clock(Protocol):
    def now(self) -> float:
        """Seconds."""
        ...

    def wait_until(self, when: float) -> None:
        """Returns at `when` or a little later, at once where that is past."""
        ...


class WallClock:
    """time.perf_counter()."""

    def now(self) -> float:
        return time.perf_counter()

    def wait_until(self, when: float) -> None:
        rest = when - time.perf_counter() - SPIN_S
        if rest > 0:
            time.sleep(rest)
        while time.perf_counter() < when:
            pass


class VirtualClock:
    """A clock that only waiting and `advance` move, so that times are exact and nothing sleeps."""

    def __init__(self) -> None:
        self._now = 0.0

    def now(self) -> float:
        return self._now

    def wait_until(self, when: float) -> None:
        self._now = max(self._now, when)

    def advance(self, seconds: float) -> None:
        self._now += seconds


class ConstantWorker:
    """Samples id 0 for every row, so that ids cost nothing. It has no KV, so copies of pages are nothing to it."""

    def __init__(self, info: DeviceInfo) -> None:
        self._info = info

    def load(self) -> DeviceInfo:
        return self._info

    def reload(self, model_path: str) -> None:
        raise ModelLoadError(f"{model_path}: this device has no weights")

    def sample_late(self, plan: Plan) -> Ids:
        return np.zeros(len(plan.late.slots), np.int64)

    def run(self, plan: Plan) -> Ids:
        return np.zeros(len(plan.sample_rows), np.int64)

    def take_logprobs(self, asked: Sequence[LogprobRow]) -> list[Logprobs]:
        """All are 0, and so are all ids."""
        sizes = [(row.count, row.count * row.top, row.count * len(row.chosen)) for row in asked]
        return [Logprobs(bytes(4 * n), bytes(4 * top), bytes(4 * top), bytes(4 * c)) for n, top, c in sizes]


class SimulatedLaunch:
    """`started` and `ended` are on the time line once the step has its place there."""

    def __init__(self, device: SimulatedDevice, plan: Plan, at: float) -> None:
        self.plan = plan
        self.launched_at = time.monotonic()
        self.at = at  # the device's time
        self.started = self.ended = 0.0  # the clock's time
        self.span: tuple[float, float] | None = None  # the device's time
        self.sampled = self.sampled_late = _NO_IDS
        self.found: list[Logprobs] = []
        self.found_late: list[Logprobs] = []
        self.error: Exception | None = None
        self._device = device

    def wait(self, timeout: float) -> bool:
        return self._device.wait(self, timeout)

    def ids(self) -> Ids:
        return self._checked(self.sampled)

    def wait_late(self, timeout: float) -> bool:
        return self._device.wait(self, timeout, late=True)

    def late_ids(self) -> Ids:
        return self._checked(self.sampled_late)

    def logprobs(self) -> list[Logprobs]:
        return self.found

    def late_logprobs(self) -> list[Logprobs]:
        return self.found_late

    def _checked(self, ids: Ids) -> Ids:
        if self.error is not None:
            raise InternalError(f"device step {self.plan.step} failed: {self.error}") from self.error
        assert self.span is not None, "ids were read before their event"
        return ids


class FinishedReload:
    """Loading takes no time on the time line."""

    def __init__(self, error: BaseException | None) -> None:
        self.error = error

    def wait(self, timeout: float) -> bool:
        return True


class SimulatedDevice:
    """`busy` and `idle` are seconds so far: of steps, and of gaps between the end of one and the start of the next.

    The device's time stands still while a wait comes back late, because the machine overslept or because the ids took
    long: `late` is the total. So idle time comes from what the host did between waits, and from nothing else.
    """

    def __init__(
        self,
        worker: Worker,
        cost: Callable[[Plan], float],
        clock: Clock,
        name: str,
        move_costs: MoveCosts | None = None,
    ) -> None:
        """`cost` gives a step's seconds, `worker` its ids; `name` and `move_costs` are for the DeviceInfo."""
        self.busy = self.idle = self.late = 0.0
        self._worker, self._cost, self._clock = worker, cost, clock
        self._name, self._move_costs = name, move_costs
        self._queue: deque[SimulatedLaunch] = deque()  # launched, not yet on the time line
        self._free_at: float | None = None
        self._error: Exception | None = None

    def start(self) -> DeviceInfo:
        return dataclasses.replace(self._worker.load(), description=self._name, costs=self._move_costs)

    def launch(self, plan: Plan) -> SimulatedLaunch:
        launch = SimulatedLaunch(self, plan, self._now())
        self._queue.append(launch)
        return launch

    def reload(self, model_path: str) -> FinishedReload:
        try:
            self._worker.reload(model_path)
        except GaplessError as error:
            return FinishedReload(error)
        return FinishedReload(None)

    def stop(self) -> None:
        """There is nothing to end."""

    def wait(self, launch: SimulatedLaunch, timeout: float, *, late: bool = False) -> bool:
        """True once `launch` has ended (with `late`: begun), False after `timeout` seconds."""
        entered = self._now()
        while launch.span is None:
            self._run(self._queue.popleft())
        fires = launch.span[0 if late else 1]
        until = max(entered, min(fires, entered + timeout))
        self._clock.wait_until(until + self.late)
        self.late = self._clock.now() - until
        return fires <= entered + timeout

    def _now(self) -> float:
        return self._clock.now() - self.late

    def _run(self, launch: SimulatedLaunch) -> None:
        """Gives a launch its place on the time line, and its ids."""
        begin = launch.at if self._free_at is None else max(launch.at, self._free_at)
        end = begin + self._cost(launch.plan)
        self.idle += begin - (begin if self._free_at is None else self._free_at)
        self.busy += end - begin
        self._free_at, launch.span = end, (begin, end)
        launch.started, launch.ended = begin + self.late, end + self.late
        try:
            if self._error is None:
                self._work(launch, launch.plan)
        except Exception as error:  # a failed step is fatal: nothing runs on its ruins
            self._error = error
        launch.error = self._error

    def _work(self, launch: SimulatedLaunch, plan: Plan) -> None:
        launch.sampled_late = self._worker.sample_late(plan)
        if plan.late_logprobs:
            launch.found_late = self._worker.take_logprobs(plan.late_logprobs)
        launch.sampled = self._worker.run(plan)
        if plan.logprobs:
            launch.found = self._worker.take_logprobs(plan.logprobs)


def simulated_device(config: ServerConfig) -> SimulatedDevice:
    """What `--device sim` asks for: the toy model's ids in the time of --sim-device running --sim-model."""
    if ToyKnobs.parse(config.toy).delay_ms:
        raise ConfigError("--toy delay_ms: under --device sim the cost model says how long a step takes")
    profile, shape = PROFILES[config.sim_device], shape_named(config.sim_model)
    cost = CostModel(profile, shape, config.page_size)
    name = f"simulated {config.sim_device} in the time of {config.sim_model}, ids of the toy model"
    costs = move_costs(shape, profile.link, profile.flops)
    return SimulatedDevice(ToyWorker(config), cost, WallClock(), name, costs)
