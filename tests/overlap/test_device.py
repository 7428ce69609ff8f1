"""The device thread: order, failure and the promise that torch lives there alone."""

import subprocess
import sys
import threading

import numpy as np
import pytest

from gapless.overlap.device import CPUDevice
from gapless.runtime.core.errors import InternalError, ModelLoadError


class Worker:
    """Runs "plans" that are callables."""

    def load(self):
        self.thread = threading.current_thread()
        return "info"

    def sample_late(self, plan):
        return np.empty(0, np.int64)

    def run(self, plan):
        assert threading.current_thread() is self.thread
        return plan()


class Step:
    """Stands in for a plan: numbered, and callable."""

    logprobs = late_logprobs = ()

    def __init__(self, step, function):
        self.step, self.function = step, function

    def __call__(self):
        return self.function()


@pytest.fixture
def device():
    device = CPUDevice(Worker)
    assert device.start() == "info"
    yield device
    device.stop()


def test_launches_run_in_order_and_their_events_fire_one_by_one(device):
    gate, ran = threading.Event(), []
    first = device.launch(Step(1, lambda: (gate.wait(10), ran.append(1), np.array([7]))[-1]))
    second = device.launch(Step(2, lambda: (ran.append(2), np.array([8]))[-1]))
    assert not first.wait(0.01) and not second.wait(0)
    gate.set()
    assert second.wait(10) and first.wait(0)
    assert (ran, first.ids().tolist(), second.ids().tolist()) == ([1, 2], [7], [8])


def test_after_a_failed_step_nothing_runs_and_all_waiters_hear_of_it(device):
    def fail():
        raise ValueError("no such page")

    ran = []
    launches = [device.launch(Step(1, fail)), device.launch(Step(2, lambda: ran.append(2)))]
    for launch in launches:
        assert launch.wait(10)
        with pytest.raises(InternalError, match="no such page"):
            launch.ids()
    assert not ran


@pytest.mark.parametrize(
    ("error", "expected"),
    [(ModelLoadError("x.gguf is truncated"), ModelLoadError), (KeyError("w"), InternalError)],
)
def test_what_loading_raises_comes_out_of_start(error, expected):
    class Broken(Worker):
        def load(self):
            raise error

    with pytest.raises(expected):
        CPUDevice(Broken).start()


def test_the_scheduler_s_modules_import_no_torch():
    code = (
        "import sys, gapless.runtime.scheduler.main, gapless.overlap.torch_worker, gapless.overlap.toy_worker;"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
