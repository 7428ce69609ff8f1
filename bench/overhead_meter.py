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

from gapless.overlap.simulated import WallClock
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
        self._left = time.perf_counter()  # the last wait
        self._used = time.process_time()
        self._spun = 0.0

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

    def waited(self, entered: float, used: float, spun: float, left: float) -> None:
        """A wait from `entered` to `left`; `used` is the process's CPU time before it, `spun` this thread's in it."""
        self.samples.append(Sample(entered - self._left, used - self._used - self._spun, self._phases))
        self._phases = defaultdict(float)
        self._left, self._used, self._spun = left, used, spun


class MeteredClock(WallClock):
    """Tells the meter of each wait. The device looks at the clock when a wait is entered, and again when it is over:
    what is measured in between costs neither host nor device anything."""

    def __init__(self, meter: Meter) -> None:
        self._meter, self._looked = meter, 0.0

    def now(self) -> float:
        self._looked = super().now()
        return self._looked

    def wait_until(self, when: float) -> None:
        entered, used, spun = self._looked, time.process_time(), time.thread_time()
        super().wait_until(when)
        spun = time.thread_time() - spun
        self._meter.waited(entered, used, spun, time.perf_counter())
