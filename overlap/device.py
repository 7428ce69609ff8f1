"""The device behind a protocol: launches run in order, and each has an event that fires at its end.

Three implementations: the CPU's thread here, `cuda.py` and `simulated.py`.
"""

from __future__ import annotations

import queue
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from gapless.runtime.core.errors import GaplessError, InternalError
from gapless.runtime.core.logprobs import LogprobRow, Logprobs
from gapless.runtime.core.plan import DeviceInfo, Plan

Ids = NDArray[np.int64]


class Launch(Protocol):
    """A step that was launched. `started` and `ended` (time.perf_counter, seconds) are known once `wait` was True."""

    plan: Plan
    launched_at: float  # time.monotonic()
    started: float
    ended: float

    def wait(self, timeout: float) -> bool:
        """True once the step has ended, False after `timeout` seconds."""
        ...

    def ids(self) -> Ids:
        """[K], what an ended step sampled; raises InternalError if it failed."""
        ...

    def wait_late(self, timeout: float) -> bool:
        """True once the step's late samples are there, which is before its forward."""
        ...

    def late_ids(self) -> Ids:
        """[L], likewise."""
        ...

    def logprobs(self) -> list[Logprobs]:
        """Those that the plan of an ended step asks for."""
        ...

    def late_logprobs(self) -> list[Logprobs]:
        """Likewise, with the late ids."""
        ...


class Device(Protocol):
    def start(self) -> DeviceInfo:
        """Loads the model and waits for it; raises what loading raised."""
        ...

    def launch(self, plan: Plan) -> Launch:
        """Hands the step to the device's stream and returns at once."""
        ...

    def reload(self, model_path: str) -> Reloading:
        """Has other weights loaded, once what was launched has run, and returns at once."""
        ...

    def stop(self) -> None:
        """Ends the device once what was launched has run."""
        ...


class Reloading(Protocol):
    """Other weights on their way in. `error` says, once `wait` was True, why the old ones stay."""

    error: BaseException | None

    def wait(self, timeout: float) -> bool:
        """True once they are there or have been refused, False after `timeout` seconds."""
        ...


class Loads(Protocol):
    """What a device's thread owns. Everything it does, loading included, happens there."""

    def load(self) -> DeviceInfo:
        """Raises ModelLoadError or ConfigError."""
        ...

    def reload(self, model_path: str) -> None:
        """Takes other weights of the same shape; raises GaplessError where there are none: the old ones stay."""
        ...


class Worker(Loads, Protocol):
    """What runs on the CPU device's thread."""

    def sample_late(self, plan: Plan) -> Ids:
        """The first part of a step: setups, copies, page table and late sampling. [L] ids."""
        ...

    def run(self, plan: Plan) -> Ids:
        """The rest: forward and sampling. [K] ids."""
        ...

    def take_logprobs(self, asked: Sequence[LogprobRow]) -> list[Logprobs]:
        """What the part of the step that was run last found for its plan's rows, which are `asked`."""
        ...


W = TypeVar("W", bound=Loads)


class QueuedLaunch(ABC, Generic[W]):
    """A launch that a thread will run: its two events, and what went wrong."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.launched_at = time.monotonic()
        self.started = self.ended = 0.0
        self._late_fired, self._fired = threading.Event(), threading.Event()
        self._error: BaseException | None = None

    def run(self, worker: W) -> BaseException | None:
        """On the device's thread; returns what the step raised."""
        try:
            self._run(worker)
        except BaseException as error:
            self.fail(error)
            return error
        return None

    def fail(self, error: BaseException) -> None:
        self._error = error
        self.ended = time.perf_counter()
        self._late_fired.set()
        self._fired.set()

    @abstractmethod
    def _run(self, worker: W) -> None:
        """Sets both events."""

    def _checked(self, ids: Ids | None) -> Ids:
        if self._error is not None:
            raise InternalError(f"device step {self.plan.step} failed: {self._error}") from self._error
        assert ids is not None, "ids were read before their event"
        return ids


class CPULaunch(QueuedLaunch[Worker]):
    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        self._ids: Ids | None = None
        self._late_ids: Ids | None = None
        self._logprobs: list[Logprobs] = []
        self._late_logprobs: list[Logprobs] = []

    def wait(self, timeout: float) -> bool:
        return self._fired.wait(timeout)

    def ids(self) -> Ids:
        return self._checked(self._ids)

    def wait_late(self, timeout: float) -> bool:
        return self._late_fired.wait(timeout)

    def late_ids(self) -> Ids:
        return self._checked(self._late_ids)

    def logprobs(self) -> list[Logprobs]:
        return self._logprobs

    def late_logprobs(self) -> list[Logprobs]:
        return self._late_logprobs

    def _run(self, worker: Worker) -> None:
        plan, self.started = self.plan, time.perf_counter()
        self._late_ids = worker.sample_late(plan)
        if plan.late_logprobs:
            self._late_logprobs = worker.take_logprobs(plan.late_logprobs)
        self._late_fired.set()
        self._ids = worker.run(plan)
        if plan.logprobs:
            self._logprobs = worker.take_logprobs(plan.logprobs)
        self.ended = time.perf_counter()
        self._fired.set()


class QueuedReload(Generic[W]):
    """A reload that a thread will do between two launches."""

    def __init__(self, model_path: str) -> None:
        self.error: BaseException | None = None
        self._model_path = model_path
        self._fired = threading.Event()

    def run(self, worker: W) -> BaseException | None:
        """On the device's thread; returns what makes the device useless, which a refusal does not."""
        try:
            worker.reload(self._model_path)
        except BaseException as error:
            self.fail(error)
            return None if isinstance(error, GaplessError) else error
        self._fired.set()
        return None

    def fail(self, error: BaseException) -> None:
        self.error = error
        self._fired.set()

    def wait(self, timeout: float) -> bool:
        return self._fired.wait(timeout)


class DeviceThread(Generic[W]):
    """One thread that makes a worker, has it load the model, and runs the launches in order.

    It is the only thread of the process that imports torch and runs its operations. On the CPU a second thread with an
    OpenMP team would make every forward up to 1.9 times slower on two cores. torch releases the GIL inside its kernels.
    """

    def __init__(self, make_worker: Callable[[], W]) -> None:
        self._make_worker = make_worker
        self._work: queue.SimpleQueue[QueuedLaunch[W] | QueuedReload[W] | None] = queue.SimpleQueue()
        self._loaded = threading.Event()
        self._info: DeviceInfo | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._main, name="device", daemon=True)

    def start(self) -> DeviceInfo:
        self._thread.start()
        self._loaded.wait()
        if isinstance(self._error, GaplessError):
            raise self._error
        if self._error is not None:
            raise InternalError(f"loading the model failed: {self._error!r}") from self._error
        assert self._info is not None
        return self._info

    def reload(self, model_path: str) -> QueuedReload[W]:
        reload: QueuedReload[W] = QueuedReload(model_path)
        self._work.put(reload)
        return reload

    def stop(self) -> None:
        self._work.put(None)
        self._thread.join()

    def _main(self) -> None:
        try:
            worker = self._make_worker()
            self._info = worker.load()
        except BaseException as error:
            self._error = error
            return
        finally:
            self._loaded.set()
        failure: BaseException | None = None
        while (work := self._work.get()) is not None:
            if failure is None:
                failure = work.run(worker)
            else:  # a failed step is fatal: nothing runs on its ruins
                work.fail(failure)


class CPUDevice(DeviceThread[Worker]):
    def launch(self, plan: Plan) -> CPULaunch:
        launch = CPULaunch(plan)
        self._work.put(launch)
        return launch
