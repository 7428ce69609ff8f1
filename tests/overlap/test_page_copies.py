"""Copies of KV pages, on every device: what was moved is read as if it had never moved."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from fake_cuda import FakeStreams, Steps, fake_device
from hand_plans import Row, copy, hand_plan
from torch import Tensor

from gapless.bench.random_model import TINY, write_random_model
from gapless.overlap.cuda_steps import CUDASteps
from gapless.overlap.device import CPUDevice, Device
from gapless.overlap.page_copies import PagePools, copy_in_stream, copy_on_cpu
from gapless.overlap.simulated import SimulatedDevice, VirtualClock, simulated_device
from gapless.overlap.torch_worker import TorchWorker
from gapless.overlap.toy_worker import ToyWorker
from gapless.runtime.core.config import ServerConfig
from gapless.runtime.core.errors import ConfigError, GaplessError
from gapless.runtime.core.plan import Copy, DeviceInfo, MoveCosts, Plan
from gapless.runtime.model.toy import ToyKnobs, toy_output

PAGE_SIZE = 4
LONG = [(37 * i + 11) % 500 + 1 for i in range(9)]
OTHER = [(53 * i + 5) % 500 + 1 for i in range(12)]
TOKEN_BYTES = 2 * 2 * 2 * 16 * 4  # of TINY in float32


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = tmp_path_factory.mktemp("tiny")
    write_random_model(directory, TINY, torch.float32)
    return str(directory)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def options(model: str, **more: Any) -> ServerConfig:
    defaults: dict[str, Any] = {
        "dtype": "float32",
        "attention_backend": "torch",
        "cpu_threads": 1,
        "page_size": PAGE_SIZE,
        "max_running_requests": 4,
        "max_total_tokens": 40,
        "preemption": "swap",
    }
    return ServerConfig(model_path=model, **defaults | more)


def simulated(config: ServerConfig) -> SimulatedDevice:
    return SimulatedDevice(ToyWorker(config), lambda plan: 1, VirtualClock(), "test")


DEVICES: dict[str, Callable[[ServerConfig], Device]] = {
    "toy": lambda config: CPUDevice(lambda: ToyWorker(config)),
    "simulated": simulated,
    "cpu": lambda config: CPUDevice(lambda: TorchWorker(config)),
    "cuda": lambda config: fake_device(config, FakeStreams(polls=1), depth=32),
}


@pytest.fixture(params=DEVICES)
def make(request: pytest.FixtureRequest, checkpoint: str) -> Callable[[], Device]:
    """Makes devices of one kind."""
    model = "toy" if request.param in ("toy", "simulated") else checkpoint
    return lambda: DEVICES[request.param](options(model))


Step = tuple[list[Row], list[Copy]]


def sampled(device: Device, steps: list[Step]) -> dict[int, list[int]]:
    """The ids of each slot. All steps are launched before the first is waited for."""
    device.start()
    plans = [hand_plan(i + 1, rows, PAGE_SIZE, copies) for i, (rows, copies) in enumerate(steps)]
    launches = [device.launch(plan) for plan in plans]
    ids: dict[int, list[int]] = {}
    for plan, launch in zip(plans, launches, strict=True):
        assert launch.wait(30)
        for slot, token in zip(plan.slots.tolist(), launch.ids().tolist(), strict=True):
            ids.setdefault(slot, []).append(token)
    device.stop()
    return ids


def decode(slot: int, start: int, pages: list[int], count: int = 1) -> list[Row]:
    return [Row(slot, [-slot], start + i, pages) for i in range(count)]


def alone(device: Device, prompt: list[int], count: int) -> list[int]:
    """The ids after `prompt` of a request that has the device for itself."""
    pages = list(range(1, 11))
    rows = [Row(1, prompt, 0, pages), *decode(1, len(prompt), pages, count - 1)]
    return sampled(device, [([row], []) for row in rows])[1]


def swapped(count: int) -> list[Step]:
    """LONG in slot 1 leaves for OTHER in slot 2 after three ids, and comes back to other pages.

    When it comes back, a page of OTHER goes to the host, back, and to a third page, all in one plan.
    """
    first, second = [3, 1, 2], [1, 2, 3, 7]
    steps: list[Step] = [([Row(1, LONG, 0, first)], [])]
    steps += [([row], []) for row in decode(1, len(LONG), first, 2)]
    steps.append(([Row(2, OTHER, 0, second)], [copy("out", {3: 2, 1: 3, 2: 1})]))
    back = [
        copy("out", {2: 4}),
        copy("in", {2: 5, 3: 4, 1: 6, 4: 8}),
        copy("page", {8: 9}),
        copy("out", {9: 2}),
        copy("in", {2: 2}),
    ]
    first, second = [5, 4, 6, 10], [1, 9, 3, 7]
    for i in range(count):
        rows = decode(1, len(LONG) + 2 + i, first) + decode(2, len(OTHER) + i, second)
        steps.append((rows, [] if i else back))
    return steps


def test_a_request_that_was_swapped_goes_on_as_if_it_had_not(make: Callable[[], Device]) -> None:
    ids = sampled(make(), swapped(4))
    assert ids[1] == alone(make(), LONG, 7)
    assert ids[2] == alone(make(), OTHER, 5)


def test_the_toy_model_s_ids_are_its_closed_form() -> None:
    ids = sampled(DEVICES["toy"](options("toy")), swapped(4))
    assert ids == {1: toy_output(ToyKnobs(), LONG, 7), 2: toy_output(ToyKnobs(), OTHER, 5)}


def test_several_requests_go_on_from_copies_of_one_partial_page(make: Callable[[], Device]) -> None:
    """The first writes on in the page itself, one computes the prompt's last token again, one goes another way."""
    pages, more = [1, 2, 3], [77, 78]
    steps: list[Step] = [([Row(1, LONG, 0, pages)], [])]
    rows = decode(1, len(LONG), pages)
    rows += [
        Row(2, LONG[-1:], len(LONG) - 1, [1, 2, 4]),
        Row(3, more, len(LONG), [1, 2, 6]),
    ]
    steps.append((rows, [copy("page", {3: 4}), copy("page", {3: 5}), copy("page", {5: 6})]))
    for i in range(1, 4):
        rows = decode(1, len(LONG) + i, [*pages, 7]) + decode(2, len(LONG) + i - 1, [1, 2, 4, 8])
        steps.append((rows + decode(3, len(LONG) + 1 + i, [1, 2, 6, 9]), []))
    ids = sampled(make(), steps)
    assert ids[1] == alone(make(), LONG, 5)
    assert ids[2] == alone(make(), LONG, 4)
    assert ids[3] == alone(make(), LONG + more, 4)


def test_a_source_may_be_named_twice(make: Callable[[], Device]) -> None:
    twice = Copy("page", np.array([3, 3], np.int32), np.array([4, 5], np.int32))
    steps: list[Step] = [([Row(1, LONG, 0, [1, 2, 3])], [])]
    rows = [*decode(1, len(LONG), [1, 2, 5]), Row(2, LONG[-1:], len(LONG) - 1, [1, 2, 4])]
    ids = sampled(make(), [*steps, (rows, [twice])])
    assert ids[1] == alone(make(), LONG, 2) and ids[2] == ids[1][:1]


def test_a_plan_may_do_nothing_but_copy(make: Callable[[], Device]) -> None:
    steps: list[Step] = [
        ([Row(1, LONG, 0, [1, 2, 3])], []),
        ([], [copy("out", {1: 1, 2: 2, 3: 3})]),
        ([], [copy("in", {3: 1, 1: 3})]),
        (decode(1, len(LONG), [3, 2, 1]), []),
    ]
    assert sampled(make(), steps)[1] == alone(make(), LONG, 2)


class OnAnotherStream(Steps):
    """Copies pages where the compute stream does not wait for them."""

    streams: FakeStreams

    def set_up(self, plan: Plan) -> None:
        with self.streams.use(self.streams.streams[0]):
            super().set_up(plan)


def test_copies_that_are_not_waited_for_show_on_the_fake_streams(checkpoint: str) -> None:
    config, streams = options(checkpoint), FakeStreams()
    steps = OnAnotherStream(config)
    steps.streams = streams
    ids = sampled(fake_device(config, streams, steps, depth=32), swapped(4))
    right = sampled(DEVICES["cuda"](config), swapped(4))
    assert ids[1][:3] == right[1][:3] and ids[1][3:] != right[1][3:]


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (copy("page", {0: 3}), "count from 1"),
        (copy("out", {3: 0}), "count from 1"),
        (Copy("in", np.array([1, 2]), np.array([3, 3])), "one target twice"),  # type: ignore[arg-type]
        (copy("page", {3: 4, 4: 5}), "reads a page that it writes"),
        (copy("out", {3: 11}), "out of bounds"),
    ],
)
def test_the_toy_model_notices_copies_that_cannot_be(bad: Copy, message: str) -> None:
    with pytest.raises(GaplessError, match=message):
        sampled(DEVICES["toy"](options("toy")), [([Row(1, LONG, 0, [1, 2, 3])], []), ([], [bad])])


@pytest.mark.parametrize("copy_page", [copy_in_stream, copy_on_cpu])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_all_layers_and_both_of_k_and_v_are_copied(
    copy_page: Callable[[Tensor, Tensor], None], dtype: torch.dtype
) -> None:
    device = torch.randn(3, 2, 5, 4, 1, 8).to(dtype)
    host, before = torch.full((2, 3, 2, 4, 1, 8), float("nan"), dtype=dtype), device.clone()
    pools = PagePools(device, host, copy_page)
    pools.carry_out([copy("out", {4: 2}), copy("page", {1: 3}), copy("in", {2: 1})])
    assert device[:, :, 1].equal(before[:, :, 4]) and device[:, :, 3].equal(before[:, :, 1])
    assert device[:, :, [0, 2, 4]].equal(before[:, :, [0, 2, 4]])
    assert host[1].equal(before[:, :, 4]) and host[0].isnan().all()


# ---------------------------------------------------------------- what a device says of itself


def info_of(config: ServerConfig, kind: str) -> DeviceInfo:
    device = DEVICES[kind](config)
    info = device.start()
    device.stop()
    return info


@pytest.mark.parametrize(("kind", "token_bytes"), [("toy", 8), ("cpu", TOKEN_BYTES), ("cuda", TOKEN_BYTES)])
def test_host_memory_holds_what_the_swap_space_says(checkpoint: str, kind: str, token_bytes: int) -> None:
    model, gib = "toy" if kind == "toy" else checkpoint, token_bytes * PAGE_SIZE / 2**30
    for space, pages in ((1, 1), (1.9, 1), (3, 3)):
        assert info_of(options(model, swap_space=space * gib), kind).host_pages == pages
        assert info_of(options(model, swap_space=space * gib, preemption="auto"), kind).host_pages == pages
    assert info_of(options(model, preemption="recompute", swap_space=0.0), kind).host_pages == 0
    for space in (0.0, 0.9 * gib):
        with pytest.raises(ConfigError, match=r"--swap-space .* less than one KV page") as caught:
            info_of(options(model, swap_space=space), kind)
        assert caught.value.param == "swap_space"


def test_host_memory_holds_no_more_than_could_be_swapped(checkpoint: str) -> None:
    config = options(checkpoint, swap_space=1e300, context_length=30)
    assert info_of(config, "cpu").host_pages == 4 * 8  # rows of so many pages
    assert info_of(options("toy", swap_space=1e300), "toy").host_pages == 10  # the pool's
    assert info_of(options("toy", toy="host_pages=3"), "toy").host_pages == 3
    assert info_of(options("toy", toy="host_pages=30"), "toy").host_pages == 30


def test_too_large_a_swap_space_is_a_clear_error(checkpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> Tensor:
        raise RuntimeError("cannot allocate")

    monkeypatch.setattr(TorchWorker, "_host_memory", fail)
    with pytest.raises(ConfigError, match=r"--swap-space 4\.0 GiB: .*cannot allocate"):
        info_of(options(checkpoint), "cpu")


def test_a_gpu_s_host_memory_is_pinned() -> None:
    if torch.cuda.is_available():
        assert CUDASteps(options("demo"))._host_memory((1, 2), torch.float32).is_pinned()
    else:
        with pytest.raises(RuntimeError):  # there is nothing to pin it for
            CUDASteps(options("demo"))._host_memory((1, 2), torch.float32)


def test_a_cpu_measures_its_rates_where_they_are_asked_for(checkpoint: str) -> None:
    assert info_of(options(checkpoint), "cpu").costs is None
    costs = info_of(options(checkpoint, preemption="auto"), "cpu").costs
    assert costs is not None and costs.link > 0 and costs.flops > 0
    weights = 64 * 16 * (2 * 4 + 2 * 2) + 3 * 64 * 128
    assert (costs.kv_bytes, costs.token_flops) == (TOKEN_BYTES, 2 * 2 * weights)
    assert costs.pair_flops == 2 * 4 * 4 * 16


@pytest.mark.parametrize(
    ("name", "dtype", "rates"),
    [
        ("NVIDIA H100 80GB HBM3", torch.bfloat16, (64e9, 989.5e12)),
        ("NVIDIA A100-SXM4-80GB", torch.bfloat16, (32e9, 312e12)),
        ("NVIDIA GH200 480GB", torch.bfloat16, None),
        ("NVIDIA H200", torch.bfloat16, (64e9, 989.5e12)),
        ("NVIDIA H200", torch.float32, None),
    ],
)
def test_a_gpu_s_rates_are_its_data_sheet_s(
    name: str, dtype: torch.dtype, rates: tuple[float, float] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(name=name))
    steps = CUDASteps(options("demo"))
    steps.device = torch.device("cuda", 0)
    assert steps._rates(torch.empty(0, dtype=dtype)) == rates


def test_a_simulated_gpu_has_the_costs_of_what_it_simulates() -> None:
    config = ServerConfig(model_path="toy", device="sim", sim_device="A100", sim_model="llama-3-8b")
    assert simulated_device(config).start().costs == MoveCosts(
        kv_bytes=131_072,
        link=32e9,
        flops=312e12,
        token_flops=2 * 32 * (4096 * 128 * (32 + 8 + 8 + 32) + 3 * 4096 * 14_336),
        pair_flops=4 * 32 * 128 * 32,
    )


def test_moving_the_toy_model_s_kv_is_cheaper_from_a_few_tokens_on() -> None:
    costs = info_of(options("toy"), "toy").costs
    assert costs is not None

    def moving_is_cheaper(tokens: int) -> bool:
        compute = costs.token_flops * tokens + costs.pair_flops * tokens * (tokens + 1) / 2
        return 2 * costs.kv_bytes * tokens / costs.link < compute / costs.flops

    assert [moving_is_cheaper(tokens) for tokens in (1, 7, 8, 100)] == [False, False, True, True]
