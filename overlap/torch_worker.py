"""Runs plans with torch: page table and future tokens on the device, the model's forward, sampling."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from gapless.runtime.core.config import ServerConfig
from gapless.runtime.core.errors import ConfigError
from gapless.runtime.core.model_path import resolve_model_path
from gapless.runtime.core.plan import DeviceInfo, Plan, Sampling

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from gapless.kernels.ops import Ops

Ids = NDArray[np.int64]
_NO_IDS: Ids = np.empty(0, np.int64)
log = logging.getLogger("gapless.worker")
CPU_POOL_TOKENS = 131_072  # a laptop's memory is for more than KV; --max-total-tokens asks for more


class TorchWorker:
    """Made and used on the device thread only; importing this module imports no torch."""

    def __init__(self, config: ServerConfig, wrap_ops: Callable[[Ops], Ops] = lambda ops: ops) -> None:
        """`wrap_ops` may put a measuring layer around the operations."""
        self._config = config
        self._wrap_ops = wrap_ops

    def load(self) -> DeviceInfo:
        started = time.monotonic()
        config = self._config
        source = resolve_model_path(config.model_path)
        import torch

        from gapless.kernels.ops import choose_ops
        from gapless.runtime.model.adjust import Adjustments
        from gapless.runtime.model.loader import load_model

        torch.set_num_threads(config.cpu_threads or len(os.sched_getaffinity(0)))
        torch.set_grad_enabled(False)
        device = torch.device("cpu")
        dtype, why = _choose_dtype(config.dtype)
        self._ops = self._wrap_ops(choose_ops(config.attention_backend, device))  # type: ignore[arg-type]
        self._model = load_model(source, dtype, self._ops, log.info)
        model_config = self._model.config
        context = config.context_length or model_config.context_length
        if context > model_config.context_length:
            raise ConfigError(
                f"--context-length {context} is more than the model's {model_config.context_length}",
                param="context_length",
            )
        pages = self._pool_pages(context, dtype)
        self._cache = self._model.new_cache(pages + 1, config.page_size)
        columns = -(-context // config.page_size)
        self._table = torch.zeros((config.max_running_requests + 1, columns), dtype=torch.int32)
        self._future = torch.zeros(config.max_running_requests + 1, dtype=torch.int64)
        self._adjustments = Adjustments(model_config.vocab_size, device)
        self._kept: dict[int, Tensor] = {}  # logits [V] by slot that wait for late sampling
        visible = (
            "a CUDA device is visible but not supported yet"
            if torch.cuda.is_available()
            else "no CUDA device"
        )
        return DeviceInfo(
            description=f"CPU with {torch.get_num_threads()} threads ({visible}), {why}, {self._ops.name} kernels",
            dtype=str(dtype).removeprefix("torch."),
            vocab_size=model_config.vocab_size,
            context_length=context,
            eos_token_ids=tuple(sorted(model_config.eos_token_ids)),
            pages=pages,
            load_seconds=time.monotonic() - started,
            attention_backend=self._ops.name,
            architecture=model_config.architecture,
        )

    def sample_late(self, plan: Plan) -> Ids:
        import torch

        from gapless.runtime.model.sampler import allow_only, sample

        at = torch.from_numpy
        for setup in plan.setups:
            self._adjustments.open(setup)
        if plan.table.size:
            self._table[at(plan.table[0]), at(plan.table[1])] = at(plan.table[2])
        if not plan.late.slots.size:
            return _NO_IDS
        logits = torch.stack([self._kept.pop(slot) for slot in plan.late.slots.tolist()])
        allowed = allow_only(logits, at(plan.late_masks))
        return self._finish(sample(allowed, plan.late, self._ops, self._adjustments), plan.late)

    def run(self, plan: Plan) -> Ids:
        import torch

        from gapless.kernels.ops import StepBatch
        from gapless.runtime.model.sampler import sample

        if not plan.slots.size:
            return _NO_IDS
        at = torch.from_numpy
        ids = at(plan.ids).to(torch.int64)
        if plan.ids.min() < 0:
            ids = torch.where(ids < 0, self._future[(-ids).clamp_(min=0)], ids)
        batch = StepBatch(
            q_start=at(plan.q_start),
            kv_len=at(plan.kv_len),
            slots=at(plan.slots),
            page_table=self._table,
            positions=at(plan.positions),
            out_loc=at(plan.out_loc),
            page_size=self._config.page_size,
            max_kv_len=plan.max_kv_len,
            max_q_len=plan.max_q_len,
        )
        hidden = self._model.forward(ids, self._cache, batch)
        last = plan.q_start[1:] - 1
        if plan.held_rows.size:
            kept = self._model.logits(hidden[at(last[plan.held_rows])])
            self._kept.update(zip(plan.slots[plan.held_rows].tolist(), kept, strict=True))
        if not plan.sample_rows.size:
            return _NO_IDS
        wanted = last[plan.sample_rows]
        if wanted.size < hidden.shape[0]:
            hidden = hidden[at(wanted)]
        logits = self._model.logits(hidden)
        return self._finish(sample(logits, plan.sampling, self._ops, self._adjustments), plan.sampling)

    def _finish(self, sampled: Tensor, sampling: Sampling) -> Ids:
        """Scatters what was sampled into the future-token table."""
        import torch

        self._future[torch.from_numpy(sampling.slots)] = sampled
        ids: Ids = sampled.numpy()
        return ids

    def _pool_pages(self, context: int, dtype: torch.dtype) -> int:
        """How many pages the KV pool gets: as asked, else a share of the memory that is free now."""
        config, model = self._config, self._model.config
        if config.max_total_tokens:
            return config.max_total_tokens // config.page_size
        token_bytes = 2 * model.num_layers * model.num_kv_heads * model.head_dim * dtype.itemsize
        fitting = int(_available_memory() * config.mem_fraction_static) // token_bytes
        tokens = min(fitting, max(CPU_POOL_TOKENS, context))
        if tokens < config.page_size:
            raise ConfigError(
                f"--mem-fraction-static {config.mem_fraction_static} of the free memory holds {tokens} tokens, "
                f"less than --page-size {config.page_size}",
                param="mem_fraction_static",
            )
        return tokens // config.page_size


def _choose_dtype(asked: str) -> tuple[torch.dtype, str]:
    """The dtype and why: bfloat16 by default only where the CPU multiplies it in hardware."""
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
