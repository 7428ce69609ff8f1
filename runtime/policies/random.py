"""A random order, the same in every run with the same seed: a base line for orders that claim to be good."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import numpy as np

from gapless.runtime.core.random import mix
from gapless.runtime.policies.base import Waiting
from gapless.runtime.policies.heap import Key

BLOCK = 256  # arrivals hashed at once: numpy's cost is one of calls
_64_BITS = (1 << 64) - 1


def key(seed: int) -> Callable[[Waiting], Key]:
    """A request's place is a hash of `seed` (any integer) and its arrival, so it stays the same however often it comes
    back. No two arrivals have the same place, for the hash is a bijection."""
    mixed = mix(np.array([seed & _64_BITS], np.uint64))

    @lru_cache(maxsize=8)
    def places(block: int) -> list[int]:
        arrivals = np.arange(block * BLOCK, (block + 1) * BLOCK, dtype=np.uint64)
        hashed: list[int] = mix(mixed ^ arrivals).tolist()
        return hashed

    return lambda request: (places(request.arrival // BLOCK)[request.arrival % BLOCK],)
