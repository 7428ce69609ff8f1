"""The toy model as a device worker: no torch, no weights."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from gapless.runtime.core.config import ServerConfig
from gapless.runtime.core.plan import DeviceInfo, Plan
from gapless.runtime.model.toy import ToyKnobs, ToyModel

CONTEXT_LENGTH = 4096
POOL_TOKENS = 1 << 16


class ToyWorker:
    def __init__(self, config: ServerConfig) -> None:
        self._config = config
        self._knobs = ToyKnobs.parse(config.toy)

    def load(self) -> DeviceInfo:
        config = self._config
        context = config.context_length or CONTEXT_LENGTH
        pages = (config.max_total_tokens or POOL_TOKENS) // config.page_size
        columns = -(-context // config.page_size)
        self.model = ToyModel(self._knobs, pages, config.page_size, config.max_running_requests, columns)
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
        )

    def sample_late(self, plan: Plan) -> NDArray[np.int64]:
        return self.model.sample_late(plan)

    def run(self, plan: Plan) -> NDArray[np.int64]:
        return self.model.run(plan)
