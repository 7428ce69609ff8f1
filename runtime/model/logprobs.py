"""Log probabilities from logits, a block of rows at a time, with no look at what a tensor holds."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from gapless.runtime.core.logprobs import LogprobRow

# Gives the logits [n, V] of some of its places; and the token after each place, int64 on the device.
Source = tuple[Callable[[slice], Tensor], Tensor]

_BLOCK_ELEMENTS = 1 << 24  # of logits looked at at once, which bounds the memory to a few times 64 MiB
_SPARE = (
    16  # more than this many equals at the edge of the best ones, and the edge may not show the lowest ids
)


def score(sources: Sequence[Source], asked: Sequence[LogprobRow], vocab_size: int) -> Tensor:
    """What `asked` ask for, as int32 words on the device; `unpack` reads them.

    The rows' places, those of all sources, follow each other.
    """
    top = max(row.top for row in asked)
    chosen = _Chosen(asked, sources[0][1].device)
    step, begin = max(1, _BLOCK_ELEMENTS // vocab_size), 0
    parts: tuple[list[Tensor], ...] = ([], [], [], [])  # the fields of Logprobs
    for logits_at, ids in sources:
        for first in range(0, len(ids), step):
            places = slice(first, min(first + step, len(ids)))
            logits = logits_at(places).float()
            norm = logits.logsumexp(1, keepdim=True)
            best = _best(logits, top)
            found = (
                logits.gather(1, ids[places, None]) - norm,
                best.to(torch.int32),
                logits.gather(1, best) - norm,
                chosen.of(logits, norm, begin + first),
            )
            for part, tensor in zip(parts, found, strict=True):
                part.append(tensor.flatten().view(torch.int32))
        begin += len(ids)
    return torch.cat([tensor for part in parts for tensor in part])


def upload(values: ArrayLike, device: torch.device) -> Tensor:
    """An int64 copy on the device that the host does not wait for."""
    tensor = torch.from_numpy(np.array(values, np.int64))
    if device.type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def _best(logits: Tensor, count: int) -> Tensor:
    """Indices [n, count] of the largest logits [n, V], the best first, the lower index first among equals."""
    if not count:
        return torch.empty((len(logits), 0), dtype=torch.int64, device=logits.device)
    found = logits.topk(min(count + _SPARE, logits.shape[1]), dim=1).indices.sort(dim=1).values
    order = logits.gather(1, found).sort(dim=1, descending=True, stable=True).indices
    return found.gather(1, order[:, :count])


class _Chosen:
    """The chosen ids of all rows as pairs of a place and an id, by place."""

    def __init__(self, asked: Sequence[LogprobRow], device: torch.device) -> None:
        counts = np.array([row.count for row in asked])
        wide = np.array([len(row.chosen) for row in asked])
        self._places = np.repeat(np.arange(counts.sum()), np.repeat(wide, counts))
        ids = [np.tile(row.chosen, row.count) for row in asked]
        self._ids = upload(np.concatenate(ids), device)
        self._rows = upload(self._places, device)

    def of(self, logits: Tensor, norm: Tensor, begin: int) -> Tensor:
        """Those of the places from `begin` on, whose logits [n, V] and norms [n, 1] are given."""
        first, end = np.searchsorted(self._places, [begin, begin + len(logits)]).tolist()
        rows, ids = self._rows[first:end] - begin, self._ids[first:end]
        return logits[rows, ids] - norm[rows, 0]
