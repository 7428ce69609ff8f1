"""The device that runs steps, behind a protocol: launches run in order, and each has an event that fires at its end."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from gapless.runtime.core.errors import GaplessError, InternalError
from gapless.runtime.core.plan import DeviceInfo, Plan

Ids = NDArray[np.int64]


class Worker(Protocol):
    """What runs on the device's thread. Everything it does, loading included, happens there."""

    def load(self) -> DeviceInfo:
        """Raises ModelLoadError or ConfigError."""
        ...

    def run(self, plan: Plan) -> Ids:
        """The ids sampled for plan.sample_rows."""
        ...


class Launch:
    """A step that was launched; its event fires when the ids are there or the step has failed."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.launched_at = time.monotonic()
        self._fired = threading.Event()
        self._ids: Ids | None = None
        self._error: BaseException | None = None

    def wait(self, timeout: float) -> bool:
        """True once the step has ended, False after `timeout` seconds."""
        return self._fired.wait(timeout)

    def ids(self) -> Ids:
        """The sampled ids of an ended step; raises InternalError if it failed."""
        if self._error is not None:
            raise InternalError(f"device step {self.plan.step} failed: {self._error}") from self._error
        assert self._ids is not None
        return self._ids

    def finish(self, ids: Ids | None, error: BaseException | None) -> None:
        self._ids, self._error = ids, error
        self._fired.set()


class CPUDevice:
    """One thread that loads the model and runs the launches in order.

    It is the only thread of the process that calls torch: a second thread with an OpenMP team would make
    every forward up to 1.9 times slower on two cores. torch releases the GIL inside its kernels.
    """

    def __init__(self, make_worker: Callable[[], Worker]) -> None:
        self._make_worker = make_worker
        self._work: queue.SimpleQueue[Launch | None] = queue.SimpleQueue()
        self._loaded = threading.Event()
        self._info: DeviceInfo | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._main, name="device", daemon=True)

    def start(self) -> DeviceInfo:
        """Loads the model and waits for it; raises what loading raised."""
        self._thread.start()
        self._loaded.wait()
        if isinstance(self._error, GaplessError):
            raise self._error
        if self._error is not None:
            raise InternalError(f"loading the model failed: {self._error!r}") from self._error
        assert self._info is not None
        return self._info

    def launch(self, plan: Plan) -> Launch:
        launch = Launch(plan)
        self._work.put(launch)
        return launch

    def stop(self) -> None:
        """Ends the thread once what was launched has run."""
        self._work.put(None)
        self._thread.join()

    def _main(self) -> None:
        worker: Any = None
        try:
            worker = self._make_worker()
            self._info = worker.load()
        except BaseException as error:
            self._error = error
        self._loaded.set()
        if self._error is not None:
            return
        failure: BaseException | None = None
        while (launch := self._work.get()) is not None:
            ids = None
            if failure is None:  # a failed step is fatal: nothing runs on its ruins
                try:
                    ids = worker.run(launch.plan)
                except BaseException as error:
                    failure = error
            launch.finish(ids, failure)
