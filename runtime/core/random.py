"""Counter-based random numbers: a function of (seed, position) alone, so that a request's samples do not depend on its
neighbours, on preemption or on the order of steps.

The mixer is splitmix64's finaliser (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """A bijection of 64-bit integers whose output bits look independent of its input's."""
    z = values + _GOLDEN
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def uniform(seeds: NDArray[np.int64], positions: NDArray[np.int32]) -> NDArray[np.float64]:
    """One number in [0, 1) with 53 random bits for each (seed, position)."""
    keys = mix(seeds.astype(np.uint64)) ^ positions.astype(np.uint64)
    return (mix(keys) >> np.uint64(11)).astype(np.float64) * 2.0**-53
