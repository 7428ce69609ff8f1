"""The host's work per step hardly grows with the batch: without a clock, by counting Python's calls."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from gapless.overlap.device import CPULaunch
from gapless.overlap.torch_worker import TorchWorker
from gapless.runtime.core.config import ServerConfig
from gapless.runtime.core.ipc import encode
from gapless.runtime.core.messages import Submit, column
from gapless.runtime.core.plan import Plan
from gapless.runtime.core.sampling import SamplingParams
from gapless.runtime.scheduler.loop import Loop
from gapless.runtime.scheduler.scheduler import Scheduler

PROMPT, PAGE = 8, 64
WARM_UP, COUNTED = 10, 20  # turns; all within the first page


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    config = transformers.LlamaConfig(
        vocab_size=128,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=256,
    )
    directory = tmp_path_factory.mktemp("llama")
    transformers.LlamaForCausalLM(config).save_pretrained(directory)
    return str(directory)


class InlineDevice:
    """Runs each launch at once, in the caller's thread, so that one profiler sees the loop and the device."""

    def __init__(self, worker: TorchWorker) -> None:
        self.worker = worker

    def launch(self, plan: Plan) -> CPULaunch:
        launch = CPULaunch(plan)
        assert launch.run(self.worker) is None
        return launch


class Channels:
    """Both ends of the loop's channels: nothing comes, and what goes is encoded."""

    def wait(self, timeout_ms: int) -> bool:
        return True

    def drain(self) -> list[Any]:
        return []

    def send(self, message: Any) -> None:
        encode(message)


def calls_per_turn(checkpoint: str, batch: int, **params: Any) -> list[int]:
    """Calls of Python and C functions in each of COUNTED turns that decode `batch` rows."""
    config = ServerConfig(
        model_path=checkpoint,
        dtype="float32",
        max_running_requests=batch,
        max_num_batched_tokens=batch * PROMPT,
        max_total_tokens=(batch + 1) * PAGE,
        page_size=PAGE,
    )
    worker = TorchWorker(config)
    scheduler = Scheduler(config, worker.load())
    loop = Loop(scheduler, InlineDevice(worker), Channels(), Channels(), lag=1, steps=1, watchdog_s=60)
    rng = np.random.default_rng(0)
    sampling = SamplingParams(max_new_tokens=PAGE - PROMPT, temperature=0.0, **params)
    prompts = [rng.integers(0, 128, PROMPT) for _ in range(batch)]
    scheduler.handle([Submit(i, column(p, "<i4"), sampling, (), seed=i) for i, p in enumerate(prompts, 1)])
    counts = []
    for turn in range(WARM_UP + COUNTED):
        calls = 0

        def count(frame: Any, event: str, arg: Any) -> None:
            nonlocal calls
            calls += event in ("call", "c_call")

        sys.setprofile(count if turn >= WARM_UP else None)
        loop.turn()
        sys.setprofile(None)
        counts.append(calls)
    return counts[WARM_UP:]


def test_a_decode_step_makes_as_many_calls_for_1024_rows_as_for_64(checkpoint: str) -> None:
    with torch.inference_mode():
        few, many = (sorted(calls_per_turn(checkpoint, batch)) for batch in (64, 1024))
    # The least of them: a heartbeat, every 250 ms, adds a few calls to its turn.
    assert few[0] == many[0]
    assert few[0] < 600
