"""The sampler of a device that must not be waited for: all rows at once, with no look at what a tensor holds.

It applies the filters of `sampler.py`, with the same random numbers, and so picks the same tokens, but for draws within
rounding of the edge between two. Rows without top_k and top_p are drawn in the order of their ids, others in
descending order of their scores, as there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from gapless.kernels.ops import Ops
    from gapless.runtime.core.plan import Sampling
    from gapless.runtime.model.adjust import Adjustments

_HOTTEST = torch.finfo(torch.float32).max
_BLOCK_ELEMENTS = 1 << 24  # of logits drawn from at once, which bounds the memory of a sort to about 1 GiB


@dataclass(frozen=True)
class SamplingTensors:
    """What Sampling says of each row, on the device: each is [R]."""

    temperature: Tensor
    top_p: Tensor
    min_p: Tensor
    top_k: Tensor
    uniform: Tensor

    def at(self, rows: slice) -> SamplingTensors:
        return SamplingTensors(
            self.temperature[rows], self.top_p[rows], self.min_p[rows], self.top_k[rows], self.uniform[rows]
        )


def sample_batched(
    logits: Tensor, batch: Sampling, fields: SamplingTensors, ops: Ops, adjustments: Adjustments
) -> Tensor:
    """The token ids, int64 [R], for logits [R, V]; `fields` are those of `batch`. See `sampler.sample`."""
    if batch.adjusted:
        logits = logits.to(torch.float32, copy=True)
        for row in batch.adjusted:
            slot, index = int(batch.slots[row]), int(batch.output_index[row])
            logits[row] = adjustments.apply(slot, logits[row], index)
    tokens = ops.argmax(logits)
    if not batch.all_greedy:
        tokens = _draw_where_hot(logits, tokens, batch, fields)
    for row in batch.adjusted:
        slot, index = int(batch.slots[row]), int(batch.output_index[row])
        adjustments.record(slot, index, tokens[row : row + 1])
    return tokens


def _draw_where_hot(logits: Tensor, best: Tensor, batch: Sampling, fields: SamplingTensors) -> Tensor:
    """`best` [R] for greedy rows, drawn tokens for the others."""
    vocabulary = logits.shape[1]
    hot = batch.temperature > 0
    sorted_rows = hot & (((batch.top_k > 0) & (batch.top_k < vocabulary)) | (batch.top_p < 1))
    step = max(1, _BLOCK_ELEMENTS // vocabulary)
    tokens = []
    for first in range(0, len(logits), step):
        rows = slice(first, first + step)
        any_sorted, any_plain = sorted_rows[rows].any(), (hot & ~sorted_rows)[rows].any()
        tokens.append(_draw(logits[rows], best[rows], fields.at(rows), bool(any_sorted), bool(any_plain)))
    return torch.cat(tokens)


def _draw(logits: Tensor, best: Tensor, fields: SamplingTensors, any_sorted: bool, any_plain: bool) -> Tensor:
    hot = fields.temperature > 0
    temperature = torch.where(hot, fields.temperature, 1.0).clamp_(max=_HOTTEST)
    scores = logits.float()
    scores = (scores - scores.amax(1, keepdim=True)).div_(temperature[:, None])
    tokens = best
    if any_plain:
        drawn = _draw_plain(scores, fields)
        tokens = torch.where(hot & (drawn >= 0), drawn, tokens)
    if any_sorted:
        filtered = ((fields.top_k > 0) & (fields.top_k < logits.shape[1])) | (fields.top_p < 1)
        drawn = _draw_sorted(scores, fields)
        tokens = torch.where(hot & filtered & (drawn >= 0), drawn, tokens)
    return tokens


def _draw_plain(scores: Tensor, fields: SamplingTensors) -> Tensor:
    """Tokens drawn from what min_p leaves, [R]; see `_invert`."""
    weights = scores.exp()  # relative to the best token's
    kept = (weights >= fields.min_p[:, None]) & (weights > 0)
    mass = torch.where(kept, weights, 0.0).cumsum(1, dtype=torch.float64)
    return _invert(mass, mass[:, -1:], kept, fields.uniform)


def _draw_sorted(scores: Tensor, fields: SamplingTensors) -> Tensor:
    """Tokens drawn from what top_k, top_p and min_p leave, [R]; see `_invert`."""
    best_first, order = torch.sort(scores, dim=1, descending=True, stable=True)
    weights = best_first.exp_()
    mass = weights.cumsum(1, dtype=torch.float64)
    ranks = torch.arange(scores.shape[1], dtype=torch.int32, device=scores.device)
    limit = torch.where(fields.top_k > 0, fields.top_k, scores.shape[1])
    allowed = torch.where(fields.top_p < 1, fields.top_p.double(), float("inf")) * mass[:, -1]
    kept = (ranks < limit[:, None]) & (mass - weights <= allowed[:, None])
    kept &= (weights >= fields.min_p[:, None]) & (weights > 0)
    count = kept.sum(1, keepdim=True)
    total = mass.gather(1, (count - 1).clamp_(min=0))  # those that are kept come first
    place = _invert(mass, total, kept, fields.uniform)
    return torch.where(place >= 0, order.gather(1, place.clamp(min=0)[:, None])[:, 0], place)


def _invert(mass: Tensor, total: Tensor, kept: Tensor, uniform: Tensor) -> Tensor:
    """The first kept index at which the running sum `mass` [R, V] exceeds `uniform` [R] of `total` [R, 1]; -1 for none.

    A parallel sum may fall by a rounding from one index to the next, so the sum alone does not say what is kept.
    """
    crossed = kept & (mass > uniform[:, None] * total)
    first = crossed.int().argmax(1)
    return torch.where(crossed.gather(1, first[:, None])[:, 0], first, -1)
