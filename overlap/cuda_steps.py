"""What steps need of a CUDA device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from gapless.overlap.cost_model import PROFILES
from gapless.overlap.page_copies import copy_in_stream
from gapless.overlap.torch_steps import TorchSteps
from gapless.runtime.core.plan import Sampling

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from gapless.overlap.plan_tensors import Fields

_MOST_TOKENS = 2**31 - 1  # places in the pool are int32
_GIB = 1 << 30


class CUDASteps(TorchSteps):
    def _open(self) -> torch.device:
        import torch

        return torch.device("cuda", torch.cuda.current_device())

    def _choose_dtype(self, asked: str) -> tuple[torch.dtype, str]:
        import torch

        if asked != "auto":
            return getattr(torch, asked), f"{asked} as asked"
        if torch.cuda.is_bf16_supported(including_emulation=False):
            return torch.bfloat16, "bfloat16"
        return torch.float32, "float32 (no bfloat16 instructions)"

    def _pool_limits(self, context: int) -> tuple[int, int]:
        import torch

        free, _ = torch.cuda.mem_get_info(self.device)
        return free, _MOST_TOKENS

    def _describe(self) -> str:
        import torch

        facts = torch.cuda.get_device_properties(self.device)
        index, count = self.device.index, torch.cuda.device_count()
        return f"CUDA device {index} of {count}: {facts.name}, {facts.total_memory / _GIB:.0f} GiB"

    def _rates(self, pool: Tensor) -> tuple[float, float] | None:
        """The data sheet's, which hold for bfloat16. Both are above what is reached, and they are only compared."""
        import torch

        words = torch.cuda.get_device_properties(self.device).name.replace("-", " ").split()
        known = [profile for name, profile in PROFILES.items() if name in words]
        if not known or pool.dtype != torch.bfloat16:
            return None
        return known[0].link, known[0].flops

    def _host_memory(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        import torch

        return torch.empty(shape, dtype=dtype, pin_memory=True)

    @staticmethod
    def _copy_page(target: Tensor, source: Tensor) -> None:
        copy_in_stream(target, source)

    def _sample(self, logits: Tensor, batch: Sampling, fields: Fields, prefix: str) -> Tensor:
        from gapless.runtime.model.sampler_batched import SamplingTensors, sample_batched

        temperature, top_p, min_p = fields[prefix + "floats"]
        top_k, uniform = fields[prefix + "ints"][2], fields[prefix + "uniform"]
        columns = SamplingTensors(temperature, top_p, min_p, top_k, uniform)
        return sample_batched(logits, batch, columns, self._ops, self._adjustments)
