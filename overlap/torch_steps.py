"""Runs plans with torch: page table and future tokens on the device, the model's forward, sampling."""

from __future__ import annotations

import dataclasses
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from gapless.overlap.cost_model import ModelShape, move_costs
from gapless.overlap.page_copies import PagePools, host_pages
from gapless.runtime.core.config import ServerConfig
from gapless.runtime.core.errors import ConfigError, ModelLoadError
from gapless.runtime.core.logprobs import LogprobRow
from gapless.runtime.core.model_path import ModelSource, resolve_model_path
from gapless.runtime.core.plan import DeviceInfo, MoveCosts, Plan, Sampling

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from gapless.kernels.ops import Ops
    from gapless.overlap.plan_tensors import Fields
    from gapless.runtime.model.interface import Model
    from gapless.runtime.model.logprobs import Source

log = logging.getLogger("gapless.worker")


class TorchSteps(ABC):
    """What is the same on every device: a step from tensors to tensors, without a look at what they hold.

    Made and used on the device's thread only; importing this module imports no torch.
    """

    def __init__(self, config: ServerConfig, wrap_ops: Callable[[Ops], Ops] = lambda ops: ops) -> None:
        """`wrap_ops` may put a measuring layer around the operations."""
        self._config = config
        self._found: Tensor | None = None
        self._wrap_ops = wrap_ops
        self.max_rows = config.max_running_requests

    @abstractmethod
    def _open(self) -> torch.device:
        """Makes the device ready."""

    @abstractmethod
    def _choose_dtype(self, asked: str) -> tuple[torch.dtype, str]:
        """The dtype of weights and KV, and why."""

    @abstractmethod
    def _pool_limits(self, context: int) -> tuple[int, int]:
        """Bytes that are free for the KV pool, and the most tokens that it may have however much is free."""

    @abstractmethod
    def _describe(self) -> str:
        """Which device, for people."""

    @abstractmethod
    def _rates(self, pool: Tensor) -> tuple[float, float] | None:
        """Bytes/s between the KV pool and host memory one way, and FLOP/s of prefill; None: not known."""

    @abstractmethod
    def _host_memory(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Memory that the device copies from and to on its own; raises RuntimeError where there is not so much."""

    @staticmethod
    @abstractmethod
    def _copy_page(target: Tensor, source: Tensor) -> None:
        """Of the KV pool or of host memory; before what this step and the next ones do with either."""

    @abstractmethod
    def _sample(self, logits: Tensor, batch: Sampling, fields: Fields, prefix: str) -> Tensor:
        """int64 [R] for logits [R, V]; the fields of `batch` have that prefix in `fields`."""

    def load(self) -> DeviceInfo:
        started = time.monotonic()
        config = self._config
        source = resolve_model_path(config.model_path)
        import torch

        from gapless.kernels.ops import choose_ops
        from gapless.runtime.model.adjust import Adjustments
        from gapless.runtime.model.loader import load_model

        torch.set_grad_enabled(False)
        device = self.device = self._open()
        dtype, why = self._choose_dtype(config.dtype)
        self._ops = self._wrap_ops(choose_ops(config.attention_backend, device))  # type: ignore[arg-type]

        def load_weights(source: ModelSource) -> Model:
            return load_model(source, dtype, self._ops, log.info, device)

        self._load_weights = load_weights
        self._model = self._load_weights(source)
        model_config = self._model.config
        context = config.context_length or model_config.context_length
        if context > model_config.context_length:
            raise ConfigError(
                f"--context-length {context} is more than the model's {model_config.context_length}",
                param="context_length",
            )
        pages = self._pool_pages(context, dtype)
        self._allocate(pages, -(-context // config.page_size))
        self._adjustments = Adjustments(model_config.vocab_size, device)
        costs = self._costs() if config.preemption == "auto" else None
        return DeviceInfo(
            description=f"{self._describe()}, {why}, {self._ops.name} kernels",
            dtype=str(dtype).removeprefix("torch."),
            vocab_size=model_config.vocab_size,
            context_length=context,
            eos_token_ids=tuple(sorted(model_config.eos_token_ids)),
            pages=pages,
            load_seconds=time.monotonic() - started,
            attention_backend=self._ops.name,
            architecture=model_config.architecture,
            host_pages=self._pools.host_pages,
            costs=costs,
            hidden_size=model_config.hidden_size,
        )

    def reload(self, model_path: str) -> None:
        """Both models are in memory until the new one is whole, so that the old one stays where it fails."""
        model = self._load_weights(resolve_model_path(model_path))
        new, old = dataclasses.asdict(model.config), dataclasses.asdict(self._model.config)
        if differing := [name for name in old if new[name] != old[name]]:
            name = differing[0]
            raise ModelLoadError(
                f"{model_path} has another {name}: {new[name]}, and the running model {old[name]}"
            )
        self._model = model

    def take_found(self) -> Tensor | None:
        """The words, for `unpack`, of the log probabilities that the last part of a step was asked for."""
        found, self._found = self._found, None
        return found

    def set_up(self, plan: Plan) -> None:
        """What comes before the step touches the page table: the slots' settings, then the copies of pages."""
        for setup in plan.setups:
            self._adjustments.open(setup)
        self._pools.carry_out(plan.copies)

    def late_tokens(self, plan: Plan, fields: Fields) -> Tensor | None:
        """Changes the page table, then samples late: int64 [L], or None."""
        import torch

        from gapless.runtime.model.sampler import allow_only

        if plan.table.size:
            slots, columns, pages = fields["table"]
            self._table[slots, columns] = pages
        if not plan.late.slots.size:
            return None
        logits = torch.stack([self._kept.pop(slot) for slot in plan.late.slots.tolist()])
        sampled = self._scatter(allow_only(logits, fields["late_masks"]), plan.late, fields, "late_")
        if plan.late_logprobs:
            self._found = self._logprobs(plan.late_logprobs, logits, sampled)
        return sampled

    def tokens(self, plan: Plan, fields: Fields) -> Tensor | None:
        """Forward and sampling: int64 [K], or None.

        For a step that only decodes, this is what a CUDA graph would capture.
        """
        import torch

        from gapless.kernels.ops import StepBatch

        if not plan.slots.size:
            return None
        ids, positions, out_loc = fields["tokens"]
        ids = ids.to(torch.int64)
        if plan.ids.min() < 0:
            ids = torch.where(ids < 0, self._future[(-ids).clamp_(min=0)], ids)
        batch = StepBatch(
            q_start=fields["q_start"],
            kv_len=fields["kv_len"],
            slots=fields["slots"],
            page_table=self._table,
            positions=positions,
            out_loc=out_loc,
            page_size=self._config.page_size,
            max_kv_len=plan.max_kv_len,
            max_q_len=plan.max_q_len,
        )
        hidden = self._model.forward(ids, self._cache, batch)
        if plan.held_rows.size:
            kept = self._model.logits(hidden[_last_of(fields, "held_rows")])
            self._kept.update(zip(plan.slots[plan.held_rows].tolist(), kept, strict=True))
        logits = sampled = None
        if plan.sample_rows.size:
            whole = plan.sample_rows.size == hidden.shape[0]
            logits = self._model.logits(hidden if whole else hidden[_last_of(fields, "sample_rows")])
            sampled = self._scatter(logits, plan.sampling, fields, "")
        if plan.logprobs:
            self._found = self._logprobs(plan.logprobs, logits, sampled, hidden)
        return sampled

    def _scatter(self, logits: Tensor, batch: Sampling, fields: Fields, prefix: str) -> Tensor:
        """Samples, and writes what was sampled to the future-token table."""
        sampled = self._sample(logits, batch, fields, prefix)
        self._future[fields[prefix + "ints"][0]] = sampled
        return sampled

    def _logprobs(
        self,
        asked: Sequence[LogprobRow],
        logits: Tensor | None,
        sampled: Tensor | None,
        hidden: Tensor | None = None,
    ) -> Tensor:
        """The words that `unpack` reads. `logits` are those of `sampled`, `hidden` [T, N] those of all tokens."""
        import torch

        from gapless.runtime.model.logprobs import score, upload

        sources: list[Source] = []
        if outputs := [row.at for row in asked if row.ids is None]:
            assert logits is not None and sampled is not None
            rows = upload(outputs, self.device)
            sources.append((lambda places: logits[rows[places]], sampled[rows]))
        if prompts := [(row.at, row.ids) for row in asked if row.count and row.ids is not None]:
            assert hidden is not None
            tokens = upload(
                np.concatenate([np.arange(at, at + len(ids)) for at, ids in prompts]), self.device
            )
            following = upload(np.concatenate([ids for _, ids in prompts]), self.device)
            sources.append((lambda places: self._model.logits(hidden[tokens[places]]), following))
        parts = [score(sources, asked, self._model.config.vocab_size)] if sources else []
        if embeds := [row.at for row in asked if row.embeds]:
            assert hidden is not None
            parts.append(hidden[upload(embeds, self.device)].float().flatten().view(torch.int32))
        return torch.cat(parts)

    def _pool_pages(self, context: int, dtype: torch.dtype) -> int:
        """How many pages the KV pool gets: as asked, else a share of the memory that is free now."""
        config, model = self._config, self._model.config
        if config.max_total_tokens:
            return config.max_total_tokens // config.page_size
        token_bytes = 2 * model.num_layers * model.num_kv_heads * model.head_dim * dtype.itemsize
        free, most = self._pool_limits(context)
        tokens = min(int(free * config.mem_fraction_static) // token_bytes, most)
        if tokens < config.page_size:
            raise ConfigError(
                f"--mem-fraction-static {config.mem_fraction_static} of the free memory holds {tokens} tokens, "
                f"less than --page-size {config.page_size}",
                param="mem_fraction_static",
            )
        return tokens // config.page_size

    def _allocate(self, pages: int, columns: int) -> None:
        """The KV pool, and what there is for each slot; a request has at most `columns` pages."""
        import torch

        rows, device = self._config.max_running_requests, self.device
        pool = self._model.new_cache(pages + 1, self._config.page_size)
        self._cache = [(k, v) for k, v in pool]
        self._pools = PagePools(pool, self._host_pool(pool, rows * columns), self._copy_page)
        self._table = torch.zeros((rows + 1, columns), dtype=torch.int32, device=device)
        self._future = torch.zeros(rows + 1, dtype=torch.int64, device=device)
        self._kept: dict[int, Tensor] = {}  # logits [V] by slot that wait for late sampling

    def _host_pool(self, pool: Tensor, most: int) -> Tensor | None:
        """Room for at most so many pages, where pages are swapped; see PagePools."""
        config = self._config
        if config.preemption == "recompute":
            return None
        layers, two, _, *page = pool.shape
        count = host_pages(config, pool[:, :, 0].nbytes, most)
        try:
            return self._host_memory((count, layers, two, *page), pool.dtype)
        except RuntimeError as error:
            raise ConfigError(
                f"--swap-space {config.swap_space} GiB: there is not so much memory ({error})",
                param="swap_space",
            ) from error

    def _costs(self) -> MoveCosts | None:
        pool = self._pools.device
        rates = self._rates(pool)
        if rates is None:
            return None
        return move_costs(ModelShape.of(self._model.config), *rates, pool.dtype.itemsize)


def _last_of(fields: Fields, rows: str) -> Tensor:
    """The index of the last token of each of these rows."""
    return fields["q_start"][1:][fields[rows]] - 1
