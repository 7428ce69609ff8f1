"""What the loop costs the host, measured between its waits for the device.

`host` is the wall time from the return of one event wait to the entry of the next. `cpu` is the processor time of all
threads of the process from one entry to the next, less what the loop's own thread spent inside the wait, where it
spins: the socket's I/O thread counts, whenever it works.
"""

from __future__ import annotations

import time
from collections import defaultdict
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gapless.overlap.simulated import SimulatedDevice, SimulatedLaunch
from gapless.runtime.core.plan import DeviceInfo, Plan
from gapless.runtime.core.trace import Recorder

F64 = NDArray[np.float64]


@dataclass(frozen=True)
class Sample:
    """From the return of one wait to the entry of the next; seconds."""

    host: float
    cpu: float
    phases: dict[str, float]


@dataclass(frozen=True)
class Window:
    """Some consecutive steps. Seconds of the device are on its own time line."""

    samples: list[Sample]
    steps: int
    busy: float
    idle: float
    finished: int

    @property
    def idle_share(self) -> float:
        return self.idle / (self.busy + self.idle)

    @property
    def effective_step(self) -> float:
        return (self.busy + self.idle) / self.steps

    def per_step(self, group: int) -> tuple[F64, F64, dict[str, float]]:
        """Host and CPU seconds a step, each over `group` steps that were composed at once; medians of the phases."""
        samples = self.samples[: len(self.samples) // group * group]

        def grouped(values: list[float]) -> F64:
            means: F64 = np.array(values).reshape(-1, group).mean(axis=1)
            return means

        names = dict.fromkeys(name for sample in samples for name in sample.phases)
        phases = {
            name: float(np.median(grouped([sample.phases.get(name, 0.0) for sample in samples])))
            for name in names
        }
        return grouped([s.host for s in samples]), grouped([s.cpu for s in samples]), phases


class Meter:
    """A Recorder that also hears of each wait; `trace` hears what it hears."""

    def __init__(self, trace: Recorder | None) -> None:
        self.trace = trace
        self.samples: list[Sample] = []
        self.steps = 0  # retired so far
        self.without_work = 0.0  # seconds in which the loop had nothing to do
        self._phases: dict[str, float] = defaultdict(float)
        self._left = time.perf_counter()
        self._used = time.process_time()
        self._waiting = 0.0  # CPU seconds of this thread in the last wait

    def phase(self, name: str, start: float, end: float) -> None:
        if name == "idle":
            self.without_work += end - start
        elif name != "wait":
            self._phases[name] += end - start
        if self.trace is not None:
            self.trace.phase(name, start, end)

    def step(self, number: int, start: float, end: float) -> None:
        self.steps += 1
        if self.trace is not None:
            self.trace.step(number, start, end)

    def enter_wait(self) -> None:
        host = time.perf_counter() - self._left
        used, self._used = self._used, time.process_time()
        self.samples.append(Sample(host, self._used - used - self._waiting, self._phases))
        self._phases = defaultdict(float)
        self._waiting = -time.thread_time()

    def leave_wait(self) -> None:
        self._waiting += time.thread_time()
        self._left = time.perf_counter()


class MeteredLaunch:
    def __init__(self, launch: SimulatedLaunch, meter: Meter) -> None:
        self.plan, self.launched_at = launch.plan, launch.launched_at
        self.started = self.ended = 0.0
        self.ids, self.late_ids, self.wait_late = launch.ids, launch.late_ids, launch.wait_late
        self._launch, self._meter = launch, meter

    def wait(self, timeout: float) -> bool:
        self._meter.enter_wait()
        fired = self._launch.wait(timeout)
        self.started, self.ended = self._launch.started, self._launch.ended
        self._meter.leave_wait()
        return fired


class MeteredDevice:
    """A simulated device whose waits the meter hears of."""

    def __init__(self, device: SimulatedDevice, meter: Meter) -> None:
        self._device, self._meter = device, meter

    def start(self) -> DeviceInfo:
        return self._device.start()

    def launch(self, plan: Plan) -> MeteredLaunch:
        return MeteredLaunch(self._device.launch(plan), self._meter)

    def stop(self) -> None:
        self._device.stop()
