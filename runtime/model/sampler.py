"""Picks the next token of each row: the best one, or one drawn by a uniform number that the plan carries.

The filters are those of SGLang's PyTorch sampler: all three look at softmax(logits / temperature), in descending order
with the lower id first among equals. A token is kept if fewer than `top_k` come before it, if those before it have at
most `top_p` of the mass, and if its own mass is at least `min_p` of the largest. The draw inverts the distribution
function of what is kept. Rows whose logits are adjusted or that are drawn are taken one by one, by operations whose
shapes do not depend on the batch, so a row's result does not depend on its neighbours.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

if TYPE_CHECKING:
    from gapless.kernels.ops import Ops
    from gapless.runtime.core.plan import Sampling
    from gapless.runtime.model.adjust import Adjustments

_NUCLEUS_SIZES = (1024, 8192)  # of the best tokens, tried for top_p before the whole vocabulary is sorted
_BLOCK = 512
_HOTTEST = float(np.finfo(np.float32).max)


def sample(logits: Tensor, batch: Sampling, ops: Ops, adjustments: Adjustments) -> Tensor:
    """The token ids, int64 [R], for logits [R, V] of bfloat16 or float32; a greedy row takes the first of equals.

    The tokens of adjusted rows are recorded in `adjustments`.
    """
    tokens = ops.argmax(logits)
    adjusted = frozenset(batch.adjusted)
    drawn = () if batch.all_greedy else np.flatnonzero(batch.temperature).tolist()
    for row in sorted(adjusted.union(drawn)):
        scores, slot, output_index = logits[row], int(batch.slots[row]), int(batch.output_index[row])
        if row in adjusted:
            scores = adjustments.apply(slot, scores, output_index)
        if batch.temperature[row]:
            tokens[row] = _draw_row(scores, batch, row)
        else:
            tokens[row : row + 1] = ops.argmax(scores[None])
        if row in adjusted:
            adjustments.record(slot, output_index, tokens[row : row + 1])
    return tokens


def allow_only(logits: Tensor, masks: Tensor) -> Tensor:
    """logits [R, V] with minus infinity where bit v % 32 of word v // 32 of masks, int32 [R, words], is not set."""
    bits = (masks.unsqueeze(-1) >> torch.arange(32, dtype=torch.int32, device=masks.device)) & 1
    allowed = bits.flatten(1)[:, : logits.shape[1]].bool()
    return logits.masked_fill(~allowed, float("-inf"))


def _draw_row(logits: Tensor, batch: Sampling, row: int) -> int:
    return _draw(
        logits,
        min(float(batch.temperature[row]), _HOTTEST),
        int(batch.top_k[row]),
        float(batch.top_p[row]),
        float(batch.min_p[row]),
        float(batch.uniform[row]),
    )


def _draw(logits: Tensor, temperature: float, top_k: int, top_p: float, min_p: float, uniform: float) -> int:
    scores = logits.float()
    scores = (scores - scores.max()).div_(temperature)
    weights = scores.exp()  # relative to the best token's
    if not 0 < top_k < len(weights) and top_p >= 1:
        return _invert(weights if min_p == 0 else weights * (weights >= min_p), uniform)

    limit = top_k if 0 < top_k < len(weights) else len(weights)
    mass_allowed = top_p * float(_block_sums(weights).sum()) if top_p < 1 else float("inf")
    sizes = (limit,) if top_p >= 1 else (*(size for size in _NUCLEUS_SIZES if size < limit), limit)
    for size in sizes:
        best = _largest(scores, size)
        kept = weights[best].double()
        mass = kept.cumsum(0)
        if float(mass[-1]) > mass_allowed:
            break
    count = int(((mass - kept <= mass_allowed) & (kept >= min_p)).sum())  # these are the first ones
    place = int(torch.searchsorted(mass[:count], uniform * float(mass[count - 1]), right=True))
    return int(best[min(place, count - 1)])


def _largest(scores: Tensor, count: int) -> Tensor:
    """Indices of the `count` largest of scores [V], best first, the lower index first among equals.

    Sorts few more than `count`: the count-th largest of the blocks' maxima has `count` elements at or above it.
    """
    width = len(scores) // (4 * count)
    if width < 2:
        return scores.sort(descending=True, stable=True).indices[:count]
    peaks = scores[: len(scores) // width * width].view(-1, width).amax(1)
    threshold = peaks.topk(count, sorted=False).values.min()
    candidates = (scores >= threshold).nonzero()[:, 0]
    return candidates[scores[candidates].sort(descending=True, stable=True).indices[:count]]


def _block_sums(weights: Tensor) -> Tensor:
    """Sums of runs of _BLOCK weights [V], in float64."""
    return F.pad(weights, (0, -len(weights) % _BLOCK)).view(-1, _BLOCK).sum(1, dtype=torch.float64)


def _invert(weights: Tensor, uniform: float) -> int:
    """The first index at which the running sum of weights [V] exceeds `uniform` of the total."""
    ends = _block_sums(weights).cumsum(0)
    target = uniform * float(ends[-1])
    block = min(int(torch.searchsorted(ends, target, right=True)), len(ends) - 1)
    first = block * _BLOCK
    inside = weights[first : first + _BLOCK].double()
    before = float(ends[block - 1]) if block else 0.0
    place = int(torch.searchsorted(inside.cumsum(0), target - before, right=True))
    if place == len(inside):  # rounding put the target past the end: the last that can be drawn
        place = int(inside.nonzero()[-1])
    return first + place
