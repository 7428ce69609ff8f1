"""The CUDA device without a GPU: its launch path on fake streams, and on tensors that hold nothing.

The fake streams do a copy only once somebody may rely on it, and poison its target until then: whatever is read before
its event changes the ids.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from fake_cuda import FakeEvent, FakeStream, FakeStreams, Steps, fake_device
from hand_plans import copy
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gapless.bench.in_process import InProcess
from gapless.bench.random_model import TINY, write_random_model
from gapless.overlap import cuda_pipeline
from gapless.overlap.cuda import cuda_device
from gapless.overlap.cuda_pipeline import Pipeline, _last_wins
from gapless.overlap.cuda_streams import cuda_is_there
from gapless.overlap.device import CPUDevice, Device
from gapless.overlap.torch_worker import TorchWorker
from gapless.runtime.core.config import ServerConfig
from gapless.runtime.core.errors import ConfigError, InternalError
from gapless.runtime.core.logprobs import LogprobRow, unpack
from gapless.runtime.core.messages import Submit, column
from gapless.runtime.core.plan import Plan
from gapless.runtime.core.sampling import SamplingParams
from gapless.runtime.scheduler.scheduler import Scheduler

PROMPTS = [[(7 * i + 3 * j) % 500 + 1 for j in range(5 + 9 * i)] for i in range(6)]
FIELDS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0, "top_p": 0.8},
    {"temperature": 0.7, "top_k": 20, "min_p": 0.01},
    {"temperature": 0.0, "frequency_penalty": 1.5, "repetition_penalty": 1.3, "min_new_tokens": 3},
    {"temperature": 1.2},
    {"temperature": 0.9, "logit_bias": {"7": 5}},
]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = tmp_path_factory.mktemp("tiny")
    write_random_model(directory, TINY, torch.float32)
    return str(directory)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class Everything:
    """A grammar that allows half of all ids, other ones each time."""

    def __init__(self) -> None:
        self.count = 0

    def mask(self, wait_s: float) -> np.ndarray:
        bits = np.zeros(TINY["vocab_size"], np.uint8)
        bits[self.count % 2 :: 2] = 1
        return np.packbits(bits, bitorder="little").view(np.int32)

    def accept(self, token: int) -> None:
        assert token % 2 == self.count % 2
        self.count += 1


def make_grammar(submit: Submit) -> Everything | None:
    return Everything() if submit.uid == 5 else None


def options(checkpoint: str, **more: Any) -> ServerConfig:
    defaults = {
        "model_path": checkpoint,
        "dtype": "float32",
        "attention_backend": "torch",
        "page_size": 4,
        "max_running_requests": 5,
        "max_total_tokens": 400,
        "chunked_prefill_size": 16,
    }
    return ServerConfig(**defaults | more)


def outputs(config: ServerConfig, device: Device) -> list[list[int]]:
    with InProcess(config, device, make_grammar) as engine:
        return engine.generate(PROMPTS, [{"max_new_tokens": 12} | fields for fields in FIELDS])


@pytest.fixture(scope="module")
def expected(checkpoint: str) -> list[list[int]]:
    """What the CPU's worker gives, row by row."""
    return outputs(options(checkpoint), CPUDevice(lambda: TorchWorker(options(checkpoint))))


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"disable_overlap_schedule": True},
        {"num_scheduler_steps": 4},
        {"page_size": 1, "disable_radix_cache": True},
        {"max_total_tokens": 96},
        {"max_total_tokens": 96, "preemption": "swap"},
    ],
    ids=str,
)
@pytest.mark.parametrize("polls", [0, 3])
def test_the_ids_are_the_cpu_s(
    checkpoint: str, expected: list[list[int]], more: dict[str, Any], polls: int
) -> None:
    """Greedy, drawn, adjusted and constrained rows, however often the host is told to wait; the last cells preempt."""
    config = options(checkpoint, **more)
    assert outputs(config, fake_device(config, FakeStreams(polls))) == expected


def test_a_step_s_order(checkpoint: str) -> None:
    """Its plan is there before it begins, its late samples are on their way before its forward is enqueued."""
    config = options(checkpoint)
    streams, steps = FakeStreams(), Steps(config)
    steps.log = streams.log
    outputs(config, fake_device(config, streams, steps))
    names = [name for name, _ in streams.log if name != "fired"][1:]  # without the clock's event
    arrives = "wait results,copy results,record results,"
    begins = "copy inputs,record inputs,wait compute,record compute,record compute,"
    step = re.compile(f"{begins}(?P<late>{arrives})?forward,record compute,(?P<ids>{arrives})?")
    text, seen = ",".join(names) + ",", set()
    while text:
        match = step.match(text)
        assert match, text[:300]
        seen |= {name for name, part in match.groupdict().items() if part}
        text = text[match.end() :]
    assert seen == {"late", "ids"}


def test_buffers_are_used_again_only_after_their_launch_was_waited_for(checkpoint: str) -> None:
    config = options(checkpoint)
    streams = FakeStreams(polls=1)
    outputs(config, fake_device(config, streams))
    uses: dict[int, int] = {}
    forwards = [i for i, (name, _) in enumerate(streams.log) if name == "copy inputs"]
    fired = {id(event): i for i, (name, event) in enumerate(streams.log) if name == "fired"}
    for start, stop in zip(forwards, [*forwards[1:], len(streams.log)], strict=True):
        place = streams.log[start][1].data_ptr()
        assert uses.get(place, -1) < start, "a plan was overwritten before its step had been waited for"
        ends = [
            event
            for name, event in streams.log[start:stop]
            if name.startswith("record") and id(event) in fired
        ]
        uses[place] = max(fired[id(event)] for event in ends)
    assert len(uses) == 2


def test_more_launches_than_buffers_are_an_error(checkpoint: str) -> None:
    config = options(checkpoint)
    device = fake_device(config, FakeStreams())
    scheduler = Scheduler(config, device.start())
    scheduler.handle([Submit(1, column(PROMPTS[0], "<i4"), SamplingParams(), (), seed=1)])
    launches = [device.launch(scheduler.compose()), device.launch(scheduler.compose())]
    with pytest.raises(AssertionError, match="in flight"):
        device.launch(scheduler.compose())
    assert all(launch.wait(10) for launch in launches)
    third = device.launch(scheduler.compose())
    device.stop()
    assert third.wait(0) and len(third.ids()) == 1
    assert launches[0].started <= launches[0].ended <= third.ended


def test_a_wait_times_out_and_goes_on_later(checkpoint: str) -> None:
    config = options(checkpoint)
    device = fake_device(config, FakeStreams(polls=1000))
    scheduler = Scheduler(config, device.start())
    scheduler.handle([Submit(1, column(PROMPTS[0], "<i4"), SamplingParams(), (), seed=1)])
    launch = device.launch(scheduler.compose())
    assert not launch.wait(0.002)
    with pytest.raises(AssertionError, match="before their event"):
        launch.ids()
    while not launch.wait(0.002):
        pass
    assert launch.wait(0) and len(launch.ids()) == 1 and not len(launch.late_ids())
    device.stop()


@pytest.mark.parametrize("where", ["set_up", "late_tokens", "tokens", "query"])
def test_a_failed_step_fails_its_launch_and_all_after_it(
    checkpoint: str, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While it is enqueued, or when the device is asked about it."""

    def fail(*_: Any) -> None:
        raise RuntimeError("an illegal memory access")

    config = options(checkpoint)
    device = fake_device(config, FakeStreams())
    scheduler = Scheduler(config, device.start())
    scheduler.handle([Submit(1, column(PROMPTS[0], "<i4"), SamplingParams(), (), seed=1)])
    monkeypatch.setattr(FakeEvent if where == "query" else Steps, where, fail, raising=True)
    for launch in (device.launch(scheduler.compose()), device.launch(scheduler.compose())):
        assert launch.wait_late(10) and launch.wait(10)
        with pytest.raises(InternalError, match="illegal memory access"):
            launch.ids()
    device.stop()


@pytest.mark.parametrize("lost", ["compute", "results"])
def test_a_missing_wait_shows_on_the_fake_streams(
    checkpoint: str, lost: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fake is worth something: it tells when a stream does not wait for another."""
    wait = FakeStream.wait_event
    monkeypatch.setattr(FakeStream, "wait_event", lambda self, event: self.name == lost or wait(self, event))
    config = options(checkpoint)
    with pytest.raises(InternalError, match="index" if lost == "compute" else "without a wait"):
        outputs(config, fake_device(config, FakeStreams()))


class NoReads(TorchFunctionMode):
    """Fails on calls that torch's dispatcher does not see: `torch.tensor` copies to a device and waits for it."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func not in (torch.tensor, torch.as_tensor, Tensor.cpu, Tensor.numpy, Tensor.tolist), func
        return func(*args, **(kwargs or {}))


class NoWaits(TorchDispatchMode):
    """Fails on what would wait for a GPU: reading a value, a shape that depends on values, a tensor on the host."""

    WAITING = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "equal")
    UPLOADING = ("lift_fresh", "detach")  # of what was made from an array

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        assert name not in self.WAITING, f"{name} waits for the device"
        result = func(*args, **(kwargs or {}))
        if name in self.UPLOADING:
            return result
        uploads = name == "_to_copy" and kwargs.get("non_blocking")
        for tensor in tree_leaves((result,) if uploads else (args, kwargs, result)):
            # A number that stands for a tensor without dimensions goes to a kernel as an argument.
            if isinstance(tensor, Tensor) and tensor.ndim:
                assert tensor.is_meta, f"{name} has a tensor on the host"
        return result


@contextmanager
def never_waiting() -> Iterator[None]:
    with NoReads(), NoWaits():
        yield


class StepsWithoutValues(Steps):
    """On tensors without contents, where whoever looks at a value fails."""

    kind = "meta"

    def set_up(self, plan: Plan) -> None:
        with never_waiting():
            super().set_up(plan)

    def late_tokens(self, plan: Plan, fields: Any) -> Tensor | None:
        with never_waiting():
            return super().late_tokens(plan, fields)

    def tokens(self, plan: Plan, fields: Any) -> Tensor | None:
        with never_waiting():
            return super().tokens(plan, fields)


def with_logprobs(plan: Plan) -> Plan:
    """Asked for log probabilities of the first sample, early and late, and of the first chunk's tokens."""
    chosen = np.array([5, 7], np.int32)
    sample = (LogprobRow(1, 1, 0, 3, chosen),)
    prompt = (LogprobRow(2, 1, 0, 2, chosen, np.array([1, 2], np.int32)),) if plan.ids.size > 1 else ()
    asked = sample + prompt if plan.sample_rows.size else prompt
    return msgspec.structs.replace(plan, logprobs=asked, late_logprobs=sample if plan.late.slots.size else ())


def test_the_launch_path_never_waits_for_the_device(checkpoint: str) -> None:
    """Every plan of a run and copies of pages, enqueued on a device whose tensors hold nothing."""
    config = options(checkpoint, preemption="swap")
    plans: list[Plan] = []
    device = fake_device(config, FakeStreams())
    launch = device.launch
    device.launch = lambda plan: plans.append(plan) or launch(plan)  # type: ignore[method-assign]
    outputs(config, device)
    assert any(plan.late.slots.size for plan in plans) and any(plan.sampling.adjusted for plan in plans)
    assert any(plan.chunks for plan in plans) and any(not plan.sampling.all_greedy for plan in plans)
    copies = (copy("page", {1: 2}), copy("out", {1: 1, 2: 3}), copy("in", {1: 1, 3: 4}))
    plans[0] = msgspec.structs.replace(plans[0], copies=copies)
    plans = [with_logprobs(plan) for plan in plans]
    pipeline = Pipeline(StepsWithoutValues(config), FakeStreams, len(plans))
    pipeline.load()
    for place, plan in enumerate(plans):
        arrival, _ = pipeline.finish(pipeline.begin(plan, place))
        ids, words = arrival.take()
        assert len(ids) == len(plan.sample_rows)
        assert len(unpack(words, plan.logprobs)) == len(plan.logprobs)


@pytest.mark.parametrize(
    "waits",
    [
        lambda x: x[0].item(),
        lambda x: x[x > 0],
        lambda x: x.nonzero(),
        lambda x: x.cpu(),
        lambda x: x.tolist(),
        lambda x: x[torch.tensor([0])],
        lambda x: x + torch.ones(3),
        lambda x: torch.tensor([1.0, 2.0], device=x.device),
        lambda x: bool(x.any()),
    ],
)
def test_what_waits_is_noticed(waits: Any) -> None:
    with pytest.raises((AssertionError, RuntimeError, NotImplementedError)), never_waiting():
        waits(torch.empty(3, device="meta"))


def test_a_large_plan_grows_its_buffers(
    checkpoint: str, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_pipeline, "FIRST_WORDS", 8)
    config, streams = options(checkpoint), FakeStreams()
    assert outputs(config, fake_device(config, streams)) == expected
    assert len(streams.buffers) > 3 * 2


def test_of_changes_to_one_entry_of_the_page_table_the_last_shows() -> None:
    """A GPU writes them in any order, so all must write the same."""
    table = np.array([[3, 3, 4, 3, 3], [0, 1, 0, 0, 1], [10, 11, 12, 13, 14]], np.int32)
    _last_wins(table)
    assert table.tolist() == [[3, 3, 4, 3, 3], [0, 1, 0, 0, 1], [13, 14, 12, 13, 14]]
    _last_wins(table[:, :3])
    assert table[2].tolist() == [13, 14, 12, 13, 14]


def test_without_a_gpu_cuda_is_a_clear_error(checkpoint: str) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    assert not cuda_is_there()
    with pytest.raises(ConfigError, match="--device cuda: torch finds no CUDA device"):
        cuda_device(options(checkpoint, device="cuda")).start()
