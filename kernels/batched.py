"""The reference's operations for a device that must not be waited for: attention with no length read on the host.

`kernels.reference` goes row by row and reads each row's length. Here every token of a block gathers the same number of
positions, `max_kv_len`, and hides those that it may not see. That reads a prompt's KV once for each of its tokens:
right, and free of synchronisation, but what a fused kernel (FlashInfer, Triton) is to replace in `ops.choose_ops`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gapless.kernels.ops import StepBatch
from gapless.kernels.reference import ReferenceOps

_BLOCK_ELEMENTS = 1 << 26  # of gathered keys, which bounds the memory of a call to about 1 GiB


class BatchedOps(ReferenceOps):
    """Implements `kernels.ops.Ops`. Shapes depend on the plan's sizes alone, never on what a tensor holds."""

    def attention(
        self,
        q: Tensor,
        cache: tuple[Tensor, Tensor],
        batch: StepBatch,
        scale: float,
        window: int | None,
        soft_cap: float | None,
    ) -> Tensor:
        tokens, heads, head_dim = q.shape
        kv_heads = cache[0].shape[2]
        ends = batch.q_start[1:]
        rows = torch.searchsorted(ends, torch.arange(tokens, dtype=ends.dtype, device=q.device), right=True)
        out = torch.empty_like(q)
        step = max(1, _BLOCK_ELEMENTS // (batch.max_kv_len * kv_heads * head_dim))
        for first in range(0, tokens, step):
            block = slice(first, first + step)
            places, hidden = _visible(batch, rows[block], batch.positions[block], window)
            k, v = (pool.flatten(0, 1)[places].float() for pool in cache)
            grouped = q[block].float().view(-1, kv_heads, heads // kv_heads, head_dim)
            scores = torch.einsum("tkgd,tskd->tkgs", grouped, k) * scale
            if soft_cap is not None:
                scores = soft_cap * torch.tanh(scores / soft_cap)
            weights = scores.masked_fill(hidden[:, None, None], float("-inf")).softmax(-1)
            out[block] = torch.einsum("tkgs,tskd->tkgd", weights, v).reshape(-1, heads, head_dim)
        return out.flatten(1)


def _visible(batch: StepBatch, rows: Tensor, positions: Tensor, window: int | None) -> tuple[Tensor, Tensor]:
    """Where tokens of `rows` at `positions` [t] find the KV of positions 0 .. max_kv_len-1, and which are hidden.

    Both are [t, max_kv_len]. A hidden position later than the token stands for the token's own, so that no other
    request's KV is ever read: zero times an infinity there would be no zero.
    """
    everything = torch.arange(batch.max_kv_len, dtype=positions.dtype, device=positions.device)
    ago = positions[:, None] - everything
    hidden = ago < 0 if window is None else (ago < 0) | (ago >= window)
    seen = torch.minimum(everything, positions[:, None])
    pages = batch.page_table[batch.slots[rows][:, None], seen // batch.page_size]
    return pages * batch.page_size + seen % batch.page_size, hidden
