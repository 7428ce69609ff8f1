"""The simulated device: exact idle time on a virtual clock, exact ids, and no torch anywhere.

Times are whole numbers, so that they add up exactly.
"""

import subprocess
import sys
import time

import numpy as np
import pytest

from gapless.overlap.simulated import (
    ConstantWorker,
    SimulatedDevice,
    VirtualClock,
    WallClock,
    simulated_device,
)
from gapless.overlap.toy_worker import ToyWorker
from gapless.runtime.core.config import ServerConfig
from gapless.runtime.core.errors import ConfigError, InternalError
from gapless.runtime.core.messages import StepOutput, Submit, column, int32s
from gapless.runtime.core.sampling import SamplingParams
from gapless.runtime.engine import Engine
from gapless.runtime.model.toy import ToyKnobs, toy_output
from gapless.runtime.scheduler.main import loop_with
from gapless.runtime.scheduler.scheduler import Scheduler

PLAN, RETIRE = 2, 1  # what the host does takes as long
HOST = PLAN + RETIRE


class Host:
    """A Recorder whose phases take their time on the virtual clock."""

    def __init__(self, clock):
        self.clock, self.steps = clock, []

    def phase(self, name, start, end):
        self.clock.advance({"plan": PLAN, "retire": RETIRE}.get(name, 0))

    def step(self, number, start, end):
        self.steps.append((number, start, end))


class Channel(list):
    """Both ends of the loop's sockets, without sockets."""

    def wait(self, timeout_ms):
        return bool(self)

    def drain(self):
        messages = list(self)
        self.clear()
        return messages

    send = list.append


class World:
    """The real loop on a simulated device of the toy model."""

    def __init__(self, step, clock=None, **options):
        config = ServerConfig(model_path="toy", device="sim", **options)
        self.clock = clock or VirtualClock()
        self.device = SimulatedDevice(ToyWorker(config), lambda plan: step, self.clock, "test")
        self.scheduler = Scheduler(config, self.device.start())
        self.inbox, self.outbox, self.host = Channel(), Channel(), Host(self.clock)
        self.loop = loop_with(config, self.scheduler, self.device, self.inbox, self.outbox, self.host)

    def submit(self, uid, prompt, count):
        params = SamplingParams(max_new_tokens=count, temperature=0.0, ignore_eos=True)
        self.inbox.append(Submit(uid, column(prompt, "<i4"), params, (), seed=uid))

    def finish(self):
        for _ in range(10_000):
            if not self.inbox and self.scheduler.is_idle:
                return
            self.loop.turn()
        raise AssertionError("the scheduler does not come to rest")

    def ids(self):
        """Output by uid, as the detokenizer would put it together."""
        names, output = {}, {}
        for message in self.outbox:
            if not isinstance(message, StepOutput):
                continue
            for opened in message.opened:
                names[opened.slot, opened.generation] = output.setdefault(opened.uid, [])
            columns = (message.slots, message.generations, message.ids)
            for slot, generation, token in zip(*(int32s(c).tolist() for c in columns), strict=True):
                names[slot, generation].append(token)
        return output


def idle_of(step, **options):
    world = World(step, **options)
    world.submit(1, [7], 8)
    world.finish()
    assert [number for number, _, _ in world.host.steps] == list(range(1, 9))
    assert world.device.busy == 8 * step
    return world.device.idle


@pytest.mark.parametrize("step", [1, 2, 10])
def test_without_overlap_the_device_waits_for_all_that_the_host_does(step):
    assert idle_of(step, disable_overlap_schedule=True) == 7 * HOST


@pytest.mark.parametrize("step", [HOST, 10])
def test_with_overlap_a_step_hides_a_host_that_is_not_slower(step):
    assert idle_of(step) == 0


@pytest.mark.parametrize("step", [1, 2])
def test_with_overlap_the_device_waits_for_what_the_step_does_not_hide(step):
    first = PLAN - step  # there is nothing to retire before the second launch
    assert idle_of(step) == first + 6 * (HOST - step)


def test_with_several_steps_a_composition_the_host_shows_once_in_each():
    assert idle_of(10, disable_overlap_schedule=True, num_scheduler_steps=4) == HOST
    assert idle_of(10, num_scheduler_steps=4) == 0


def test_a_gap_without_work_is_a_gap_of_the_device_all_the_same():
    world = World(10)
    for uid in (1, 2):
        world.submit(uid, [uid], 1)
        world.finish()
        world.clock.advance(100)
    assert world.device.idle == 100 + HOST


class Oversleeper(VirtualClock):
    """Each wait comes back 5 late."""

    waits = 0

    def wait_until(self, when):
        if when > self.now():
            self.waits += 1
            super().wait_until(when + 5)


@pytest.mark.parametrize("overlap", [True, False])
def test_oversleeping_is_kept_out_of_the_idle_time(overlap):
    world = World(4, clock=Oversleeper(), disable_overlap_schedule=not overlap)
    world.submit(1, [7], 8)
    world.finish()
    assert world.device.idle == (0 if overlap else 7 * HOST)
    assert world.device.late == 5 * world.clock.waits > 0


def test_an_event_fires_at_its_time_and_a_wait_gives_up_at_its_own():
    class Step:
        logprobs = late_logprobs = ()
        step, late, sample_rows = 1, type("Late", (), {"slots": np.arange(2)}), np.arange(3)

    clock = VirtualClock()
    device = SimulatedDevice(ConstantWorker(None), lambda plan: 10, clock, "test")
    first, second = device.launch(Step), device.launch(Step)
    assert second.wait_late(10) and clock.now() == 10  # which is when it begins
    assert first.wait(0) and not second.wait(4) and clock.now() == 14
    assert second.wait(6) and clock.now() == 20
    assert (second.started, second.ended) == (10, 20)
    assert second.ids().tolist() == [0, 0, 0] and second.late_ids().tolist() == [0, 0]


def test_the_wall_clock_is_never_early():
    clock = WallClock()
    for seconds in (0.0, 1e-4, 1e-3):
        when = time.perf_counter() + seconds
        clock.wait_until(when)
        assert time.perf_counter() >= when


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("steps", [1, 4])
@pytest.mark.parametrize("overlap", [True, False])
def test_ids_are_the_toy_model_s_closed_form(overlap, steps, page_size):
    world = World(
        1,
        disable_overlap_schedule=not overlap,
        num_scheduler_steps=steps,
        page_size=page_size,
        chunked_prefill_size=8,
        max_running_requests=3,
    )
    asked = {uid: ([uid, *range(3 * uid)], 1 + 5 * uid % 13) for uid in range(1, 9)}
    for uid, (prompt, count) in asked.items():
        world.submit(uid, prompt, count)
        world.loop.turn()
    world.finish()
    expected = {uid: toy_output(ToyKnobs(), prompt, count) for uid, (prompt, count) in asked.items()}
    assert world.ids() == expected
    assert world.device.busy + world.device.idle == world.host.steps[-1][2] - world.host.steps[0][1]
    world.scheduler.check_idle()


def test_a_failed_step_fails_the_loop():
    world = World(1, toy="raise_at_step=3")
    world.submit(1, [7], 8)
    with pytest.raises(InternalError, match=r"step 3 failed: .*told to fail"):
        world.finish()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model_path": "demo"}, "--device sim .*--model-path toy"),
        ({"sim_device": "B300"}, "--sim-device 'B300': must be one of A100, H100, H200"),
        ({"sim_model": "llama-9"}, "--sim-model llama-9"),
        ({"toy": "delay_ms=3"}, "--toy delay_ms"),
    ],
)
def test_what_it_cannot_simulate_is_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        simulated_device(ServerConfig(**{"model_path": "toy", "device": "sim", **options}))


def test_the_engine_runs_on_it():
    with Engine(model_path="toy", device="sim", sim_model="gemma-3-270m", toy="eos_at=9") as engine:
        answer = engine.generate(input_ids=[1, 2, 3], sampling_params={"max_new_tokens": 8, "temperature": 0})
    assert answer["output_ids"] == toy_output(ToyKnobs(eos_at=9), [1, 2, 3], 8)


def test_no_torch_is_imported_to_serve_on_it():
    code = """
import sys, numpy as np
from gapless.runtime.core.config import ServerConfig
from gapless.runtime.core.messages import Submit, column
from gapless.runtime.core.sampling import SamplingParams
from gapless.runtime.scheduler.main import make_device
from gapless.runtime.scheduler.scheduler import Scheduler
config = ServerConfig(model_path="toy", device="sim")
device = make_device(config)
scheduler = Scheduler(config, device.start())
scheduler.handle([Submit(1, column([5, 6], "<i4"), SamplingParams(max_new_tokens=3), (), seed=1)])
while (plan := scheduler.compose()) is not None:
    launch = device.launch(plan)
    assert launch.wait(10)
    scheduler.retire(plan, launch.ids(), launch.late_ids())
scheduler.check_idle()
sys.exit("torch" in sys.modules)
"""
    assert subprocess.run([sys.executable, "-P", "-c", code], timeout=60, check=False).returncode == 0
