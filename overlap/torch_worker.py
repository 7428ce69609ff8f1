"""Runs plans with torch on the CPU."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from gapless.overlap.page_copies import copy_on_cpu
from gapless.overlap.torch_steps import TorchSteps
from gapless.runtime.core.logprobs import LogprobRow, Logprobs, unpack
from gapless.runtime.core.plan import Plan, Sampling

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from gapless.overlap.plan_tensors import Fields

Ids = NDArray[np.int64]
_NO_IDS: Ids = np.empty(0, np.int64)
CPU_POOL_TOKENS = 131_072  # a laptop's memory is for more than KV; --max-total-tokens asks for more


class TorchWorker(TorchSteps):
    """Implements `device.Worker`."""

    def sample_late(self, plan: Plan) -> Ids:
        self.set_up(plan)
        return _ids(self.late_tokens(plan, _fields(plan)))

    def run(self, plan: Plan) -> Ids:
        return _ids(self.tokens(plan, _fields(plan)))

    def take_logprobs(self, asked: Sequence[LogprobRow]) -> list[Logprobs]:
        found = self.take_found()
        assert found is not None, "nothing was asked for"
        return unpack(found.numpy(), asked)

    def _open(self) -> torch.device:
        import torch

        torch.set_num_threads(self._config.cpu_threads or len(os.sched_getaffinity(0)))
        return torch.device("cpu")

    def _choose_dtype(self, asked: str) -> tuple[torch.dtype, str]:
        return _choose_dtype(asked)

    def _pool_limits(self, context: int) -> tuple[int, int]:
        return _available_memory(), max(CPU_POOL_TOKENS, context)

    def _describe(self) -> str:
        import torch

        from gapless.overlap.cuda_streams import cuda_is_there

        why = "there is a CUDA device: --device cuda" if cuda_is_there() else "no CUDA device"
        return f"CPU with {torch.get_num_threads()} threads ({why})"

    def _rates(self, pool: Tensor) -> tuple[float, float]:
        from gapless.overlap.cpu_rates import page_copy_rate, product_rate

        return page_copy_rate(pool), product_rate(self._ops, pool.dtype)

    def _host_memory(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        import torch

        return torch.empty(shape, dtype=dtype)  # what is never touched costs nothing

    @staticmethod
    def _copy_page(target: Tensor, source: Tensor) -> None:
        copy_on_cpu(target, source)

    def _sample(self, logits: Tensor, batch: Sampling, fields: Fields, prefix: str) -> Tensor:
        from gapless.runtime.model.sampler import sample

        return sample(logits, batch, self._ops, self._adjustments)


def _fields(plan: Plan) -> Fields:
    from gapless.overlap.plan_tensors import HostFields

    return HostFields(plan.buffer)


def _ids(tokens: Tensor | None) -> Ids:
    return _NO_IDS if tokens is None else tokens.numpy()


def _choose_dtype(asked: str) -> tuple[torch.dtype, str]:
    """bfloat16 by default only where the CPU multiplies it in hardware."""
    import torch

    if asked != "auto":
        return getattr(torch, asked), f"{asked} as asked"
    flags = Path("/proc/cpuinfo").read_text().split() if Path("/proc/cpuinfo").exists() else []
    for name in ("amx_bf16", "avx512_bf16", "bf16"):
        if name in flags:
            return torch.bfloat16, f"bfloat16 ({name})"
    return torch.float32, "float32 (no bfloat16 instructions)"


def _available_memory() -> int:
    """Bytes that can be taken without swapping, within the container's limit where there is one (cgroup v2)."""
    fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    available = int(fields["MemAvailable"].split()[0]) * 1024
    group = Path("/sys/fs/cgroup")
    if (group / "memory.max").exists() and (limit := (group / "memory.max").read_text().strip()) != "max":
        available = min(available, int(limit) - int((group / "memory.current").read_text()))
    return max(available, 0)
