"""The toy model as a device worker: no torch, no weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from gapless.overlap.page_copies import host_pages
from gapless.runtime.core.config import ServerConfig
from gapless.runtime.core.errors import ModelLoadError
from gapless.runtime.core.logprobs import LogprobRow, Logprobs
from gapless.runtime.core.plan import DeviceInfo, MoveCosts, Plan
from gapless.runtime.model.toy import EMBEDDING_SIZE, ENTRY_BYTES, ToyKnobs, ToyModel

CONTEXT_LENGTH = 4096
POOL_TOKENS = 1 << 16
# Moving a request's KV out and in takes 2 ns a token, computing it 0.5 ns a pair: moving is cheaper from 8 tokens on.
COSTS = MoveCosts(kv_bytes=ENTRY_BYTES, link=8e9, flops=1e9, token_flops=0, pair_flops=0.5)


class ToyWorker:
    def __init__(self, config: ServerConfig) -> None:
        self._config = config
        self._knobs = ToyKnobs.parse(config.toy)

    def load(self) -> DeviceInfo:
        config = self._config
        context = config.context_length or CONTEXT_LENGTH
        pages = (config.max_total_tokens or POOL_TOKENS) // config.page_size
        columns = -(-context // config.page_size)
        host = host_pages(config, ENTRY_BYTES * config.page_size, self._knobs.host_pages or pages)
        self.model = ToyModel(
            self._knobs, pages, config.page_size, config.max_running_requests, columns, host_pages=host
        )
        return DeviceInfo(
            description="toy model (a test double on the CPU)",
            dtype="uint64",
            vocab_size=self._knobs.vocab_size,
            context_length=context,
            eos_token_ids=(self._knobs.eos,),
            pages=pages,
            load_seconds=0.0,
            attention_backend="toy",
            architecture="toy",
            host_pages=host,
            costs=COSTS,
            hidden_size=EMBEDDING_SIZE,
        )

    def reload(self, model_path: str) -> None:
        """`toy:seed=7` is another toy model, and `toy` the one that the knobs name."""
        name, _, knobs = model_path.partition(":")
        if name != "toy":
            raise ModelLoadError(f"{model_path} is no toy model: toy or toy:seed=NUMBER")
        seed = ToyKnobs.parse(knobs).seed if knobs else self._knobs.seed
        self.model.knobs = dataclasses.replace(self._knobs, seed=seed)

    def sample_late(self, plan: Plan) -> NDArray[np.int64]:
        return self.model.sample_late(plan)

    def run(self, plan: Plan) -> NDArray[np.int64]:
        return self.model.run(plan)

    def take_logprobs(self, asked: Sequence[LogprobRow]) -> list[Logprobs]:
        return self.model.found
