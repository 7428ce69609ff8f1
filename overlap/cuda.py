"""The CUDA device. The loop's thread launches and waits; the device's thread enqueues (see `cuda_pipeline`)."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from gapless.overlap.cuda_pipeline import Arrival, Pipeline
from gapless.overlap.cuda_steps import CUDASteps
from gapless.overlap.cuda_streams import TorchStreams
from gapless.overlap.device import DeviceThread, Ids, QueuedLaunch
from gapless.runtime.core.config import ServerConfig
from gapless.runtime.core.logprobs import Logprobs, unpack
from gapless.runtime.core.plan import I32, Plan

POLL_S = 20e-6  # CUDA has no wait with a timeout; a sleep leaves the interpreter to the thread that enqueues
STOP_S = 60.0
_NO_WORDS: I32 = np.empty(0, np.int32)


class CUDALaunch(QueuedLaunch[Pipeline]):
    """`_late_fired` and `_fired` say that the step was enqueued, so that its CUDA events can be asked."""

    def __init__(self, plan: Plan, place: int) -> None:
        super().__init__(plan)
        self._place = place
        self._ids: Ids | None = None
        self._late_ids: Ids | None = None
        self._words = self._late_words = _NO_WORDS

    @property
    def is_over(self) -> bool:
        """It was waited for, so that nothing on the device uses its buffers."""
        return self._ids is not None or self._error is not None

    def wait(self, timeout: float) -> bool:
        deadline = time.perf_counter() + timeout
        if not self.wait_late(timeout) or not self._fired.wait(deadline - time.perf_counter()):
            return False
        if not self.is_over:
            taken = self._take(self._arrival, deadline)
            if taken is not None:
                self._ids, self._words = taken
                self.started = self._clock.seconds(self._step.started)
                self.ended = self._clock.seconds(self._ended)
        return self.is_over

    def ids(self) -> Ids:
        return self._checked(self._ids)

    def wait_late(self, timeout: float) -> bool:
        deadline = time.perf_counter() + timeout
        if not self._late_fired.wait(timeout):
            return False
        if self._late_ids is None and self._error is None:
            taken = self._take(self._step.late, deadline)
            if taken is not None:
                self._late_ids, self._late_words = taken
        return self._late_ids is not None or self._error is not None

    def late_ids(self) -> Ids:
        return self._checked(self._late_ids)

    def logprobs(self) -> list[Logprobs]:
        return unpack(self._words, self.plan.logprobs)

    def late_logprobs(self) -> list[Logprobs]:
        return unpack(self._late_words, self.plan.late_logprobs)

    def _run(self, pipeline: Pipeline) -> None:
        self._clock = pipeline.clock
        self._step = pipeline.begin(self.plan, self._place)
        self._late_fired.set()
        self._arrival, self._ended = pipeline.finish(self._step)
        self._fired.set()

    def _take(self, arrival: Arrival, deadline: float) -> tuple[Ids, I32] | None:
        """What has come once it is there; None when the deadline has passed, or the device has failed."""
        try:
            while not arrival.event.query():
                if time.perf_counter() >= deadline:
                    return None
                time.sleep(POLL_S)
        except RuntimeError as error:  # a kernel's failure is reported to whoever asks next
            self.fail(error)
            return None
        return arrival.take()


class CUDADevice(DeviceThread[Pipeline]):
    """Takes at most `depth` launches before the oldest is waited for; each has buffers of its own."""

    def __init__(self, make_pipeline: Callable[[int], Pipeline], depth: int) -> None:
        super().__init__(lambda: make_pipeline(depth))
        self._newest: list[CUDALaunch | None] = [None] * depth  # of each place among the buffers
        self._launches = 0

    def launch(self, plan: Plan) -> CUDALaunch:
        place = self._launches % len(self._newest)
        before = self._newest[place]
        assert before is None or before.is_over, "more launches are in flight than there are buffers"
        launch = self._newest[place] = CUDALaunch(plan, place)
        self._launches += 1
        self._work.put(launch)
        return launch

    def stop(self) -> None:
        super().stop()
        for launch in self._newest:
            if launch is not None:
                launch.wait(STOP_S)


def cuda_device(config: ServerConfig) -> CUDADevice:
    """The device for a loop with the options' lag and steps, which has at most (lag + 1) * steps launches in flight."""
    lag = 0 if config.disable_overlap_schedule else 1
    return CUDADevice(
        lambda depth: Pipeline(CUDASteps(config), TorchStreams, depth),
        (lag + 1) * config.num_scheduler_steps + 1,
    )
