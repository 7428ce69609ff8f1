"""Seeded draws that workloads are made of."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int32]


class RandomIds:
    """Ids uniform over `vocabulary`, and what else a workload draws. The seed and the order of calls settle it."""

    def __init__(self, seed: int | Sequence[int], vocabulary: Ids) -> None:
        self._random = np.random.default_rng(seed)
        self._vocabulary = vocabulary

    def ids(self, length: int) -> Ids:
        return self._vocabulary[self._random.integers(0, len(self._vocabulary), length, dtype=np.int32)]

    def seconds(self, mean: float) -> float:
        """Exponentially distributed."""
        return float(self._random.exponential(mean))

    def between(self, low: int, high: int) -> int:
        """Both included."""
        return int(self._random.integers(low, high + 1))

    def shuffled(self, count: int) -> list[int]:
        return [int(number) for number in self._random.permutation(count)]
