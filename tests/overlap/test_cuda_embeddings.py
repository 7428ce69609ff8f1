"""Embeddings on the CUDA device's launch path, on fake streams, beside log probabilities, are those of the CPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from fake_cuda import FakeStreams, fake_device

from gapless.bench.random_model import TINY, write_random_model
from gapless.overlap.device import CPUDevice, Device
from gapless.overlap.torch_worker import TorchWorker
from gapless.runtime.core.config import ServerConfig
from gapless.runtime.core.logprobs import LogprobParams
from gapless.runtime.core.messages import Submit, column
from gapless.runtime.core.sampling import SamplingParams
from gapless.runtime.scheduler.scheduler import Scheduler

PROMPTS = [[(7 * i + 3 * j) % 500 + 1 for j in range(5 + 9 * i)] for i in range(6)]


def run(config: ServerConfig, device: Device) -> dict[int, np.ndarray]:
    """By uid: the embedding, or the prompt's log probabilities."""
    scheduler = Scheduler(config, device.start())
    for uid, prompt in enumerate(PROMPTS):
        params, scores = SamplingParams.parse({"max_new_tokens": 0}), LogprobParams(1)
        more = {"logprobs": scores} if uid % 3 == 1 else {"embed": True}
        scheduler.handle([Submit(uid, column(prompt, "<i4"), params, (), seed=uid, **more)])
    found: dict[int, bytes] = {}
    uids: dict[tuple[int, int], int] = {}
    while not scheduler.is_idle:
        plan = scheduler.compose()
        assert plan is not None
        launch = device.launch(plan)
        assert launch.wait(60)
        scheduler.retire(
            plan, launch.ids(), launch.late_ids(), launch.logprobs() if plan.logprobs else (), ()
        )
        output = scheduler.take_output()
        if output is None:
            continue
        uids |= {(opened.slot, opened.generation): opened.uid for opened in output.opened}
        for slot, generation, of_prompt, part in output.logprobs:
            assert of_prompt
            uid = uids[slot, generation]
            found[uid] = found.get(uid, b"") + part.embedding + part.values
    device.stop()
    return {uid: np.frombuffer(data, np.float32) for uid, data in found.items()}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = tmp_path_factory.mktemp("tiny")
    write_random_model(directory, TINY, torch.float32)
    return str(directory)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("chunk", [7, 64])
def test_they_are_those_of_the_cpu(checkpoint: str, dtype: str, chunk: int) -> None:
    config = ServerConfig(
        model_path=checkpoint,
        dtype=dtype,
        attention_backend="torch",
        page_size=4,
        max_running_requests=5,
        max_total_tokens=400,
        chunked_prefill_size=chunk,
    )
    want = run(config, CPUDevice(lambda: TorchWorker(config)))
    got = run(config, fake_device(config, FakeStreams(2)))
    sizes = [len(prompt) - 1 if uid % 3 == 1 else TINY["hidden_size"] for uid, prompt in enumerate(PROMPTS)]
    assert [len(want[uid]) for uid in range(len(PROMPTS))] == sizes
    for uid, values in want.items():
        np.testing.assert_allclose(got[uid], values, atol=1e-4 if dtype == "float32" else 0.1)
