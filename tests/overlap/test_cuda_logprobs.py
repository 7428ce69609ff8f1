"""Log probabilities on the CUDA device's launch path, on fake streams, are those of the CPU's worker."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from fake_cuda import FakeStreams, fake_device

from gapless.bench.random_model import TINY, write_random_model
from gapless.overlap.device import CPUDevice, Device
from gapless.overlap.torch_worker import TorchWorker
from gapless.runtime.core.config import ServerConfig
from gapless.runtime.core.logprobs import LogprobParams
from gapless.runtime.core.messages import StepOutput, Submit, column
from gapless.runtime.core.sampling import SamplingParams
from gapless.runtime.scheduler.main import loop_with
from gapless.runtime.scheduler.scheduler import Scheduler

PROMPTS = [[(7 * i + 3 * j) % 500 + 1 for j in range(5 + 9 * i)] for i in range(6)]
WANTED = [
    LogprobParams(0, 3, (4, 500)),
    None,
    LogprobParams(len(PROMPTS[2]), 0, (9,)),
    LogprobParams(20, 5),
    LogprobParams(0),
    LogprobParams(len(PROMPTS[5]), 2),
]
FIELDS = [
    {"temperature": 0.0},
    {"temperature": 0.8, "top_p": 0.9},
    {"temperature": 0.0, "presence_penalty": 1.5},
]
Found = dict[
    tuple[int, bool], tuple[np.ndarray, np.ndarray]
]  # (uid, of the prompt): numbers, ids of the best


class Evens:
    """A grammar that allows half of all ids."""

    def mask(self, wait_s: float) -> np.ndarray:
        bits = np.zeros(TINY["vocab_size"], np.uint8)
        bits[::2] = 1
        return np.packbits(bits, bitorder="little").view(np.int32)

    def accept(self, token: int) -> None:
        assert token % 2 == 0


class Channels:
    """Both ends of a loop's channels."""

    def __init__(self) -> None:
        self.outputs: list[StepOutput] = []

    def wait(self, timeout_ms: int) -> bool:
        return True

    def drain(self) -> list[Any]:
        return []

    def send(self, message: Any) -> None:
        if isinstance(message, StepOutput):
            self.outputs.append(message)


def run(config: ServerConfig, device: Device) -> Found:
    channels = Channels()
    scheduler = Scheduler(config, device.start(), lambda submit: Evens() if submit.uid == 3 else None)
    loop = loop_with(config, scheduler, device, channels, channels)
    for uid, (prompt, wanted) in enumerate(zip(PROMPTS, WANTED, strict=True)):
        params = SamplingParams.parse({"max_new_tokens": 8} | FIELDS[uid % 3])
        scheduler.handle([Submit(uid, column(prompt, "<i4"), params, (), seed=uid, logprobs=wanted)])
    while not scheduler.is_idle:
        loop.turn()
    device.stop()
    return collected(channels.outputs)


def collected(outputs: list[StepOutput]) -> Found:
    uids: dict[tuple[int, int], int] = {}
    parts: dict[tuple[int, bool], list[tuple[bytes, bytes]]] = {}
    for output in outputs:
        uids |= {(opened.slot, opened.generation): opened.uid for opened in output.opened}
        for slot, generation, of_prompt, found in output.logprobs:
            numbers = found.values + found.top + found.chosen
            parts.setdefault((uids[slot, generation], of_prompt), []).append((numbers, found.top_ids))
    return {
        key: (
            np.frombuffer(b"".join(numbers for numbers, _ in items), np.float32),
            np.frombuffer(b"".join(ids for _, ids in items), np.int32),
        )
        for key, items in parts.items()
    }


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = tmp_path_factory.mktemp("tiny")
    write_random_model(directory, TINY, torch.float32)
    return str(directory)


def options(checkpoint: str, **more: Any) -> ServerConfig:
    defaults = {"model_path": checkpoint, "dtype": "float32", "attention_backend": "torch", "page_size": 4}
    defaults |= {"max_running_requests": 5, "max_total_tokens": 400, "chunked_prefill_size": 16}
    return ServerConfig(**defaults | more)


@pytest.mark.parametrize(
    "more",
    [{}, {"disable_overlap_schedule": True}, {"num_scheduler_steps": 4}, {"max_total_tokens": 96}],
    ids=str,
)
@pytest.mark.parametrize("polls", [0, 2])
def test_they_are_those_of_the_cpu(checkpoint: str, more: dict[str, Any], polls: int) -> None:
    config = options(checkpoint, **more)
    want = run(config, CPUDevice(lambda: TorchWorker(config)))
    got = run(config, fake_device(config, FakeStreams(polls)))
    assert want.keys() == got.keys()
    assert {uid for uid, of_prompt in want if not of_prompt} == {0, 2, 3, 4, 5}
    assert {uid for uid, of_prompt in want if of_prompt} == {0, 3, 4}
    for key, (numbers, ids) in want.items():
        np.testing.assert_allclose(got[key][0], numbers, atol=1e-4)
        assert got[key][1].tolist() == ids.tolist()
