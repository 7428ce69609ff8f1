"""Whether two things differ by more than their measurements do by themselves. All of it on ratios, B / A.

Repeated runs: Student's t on the runs' logarithms, with one variance for both sides. Under the hypothesis that is
tested, that both are the same thing, that is exact where the logarithms are normal, and one run may stand against
several. One run a side: the run is cut into blocks of neighbouring requests, 10 of 300, 30 of 5,000, which are drawn
with replacement (Carlstein's block bootstrap, 1986): neighbours share queues and batches, so single requests are not
independent. What differs from run to run, such as the machine's mood, no single run can show.

Of many figures some differ by chance: Holm's correction (1979) keeps the chance of any false alarm at 5 %.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

LEVEL = 0.05
DRAWS = 200
LEAST_BLOCKS = 5
LEAST_TAIL = 5  # values beyond a percentile without which its spread is not known
_POINTS = 2000


@dataclass(frozen=True)
class Ratio:
    """B / A, its 95 % confidence interval, and the chance of one so far from 1 where both are the same."""

    value: float
    low: float
    high: float
    p: float


@dataclass(frozen=True)
class Draws:
    """A figure as it comes out of blocks that were drawn."""

    values: Floats
    blocks: int


def between_runs(a: Sequence[float], b: Sequence[float]) -> Ratio:
    """The ratio of geometric means. Values are above 0, and at least one side has two."""
    logs_a, logs_b = np.log(a), np.log(b)
    freedom = len(a) + len(b) - 2
    squares = ((logs_a - logs_a.mean()) ** 2).sum() + ((logs_b - logs_b.mean()) ** 2).sum()
    error = math.sqrt(squares / freedom * (1 / len(a) + 1 / len(b)))
    return _ratio(float(logs_b.mean() - logs_a.mean()), error, freedom)


def within_runs(a: float, b: float, draws_a: Draws, draws_b: Draws) -> Ratio:
    """The ratio of two figures, each with what the bootstrap drew of it. All are above 0.

    Drawn blocks spread by (blocks - 1) / blocks less than blocks of new runs would.
    """
    variances = (
        np.log(drawn.values).var(ddof=1) * drawn.blocks / (drawn.blocks - 1) for drawn in (draws_a, draws_b)
    )
    return _ratio(math.log(b / a), math.sqrt(sum(variances)), draws_a.blocks + draws_b.blocks - 2)


def exactly(a: float, b: float) -> Ratio:
    """The ratio of figures that no chance has a part in."""
    return Ratio(b / a, b / a, b / a, float(a == b))


def block_count(requests: int) -> int:
    return max(round(math.pow(requests, 0.4)), 1)


def blocks(requests: Sequence[Floats]) -> list[Floats]:
    """The values of neighbours put together."""
    count = block_count(len(requests))
    bounds = [block * len(requests) // count for block in range(count + 1)]
    return [np.concatenate([np.empty(0), *requests[low:high]]) for low, high in pairwise(bounds)]


def bootstrap(blocks: Sequence[Floats], percent: float | None, random: np.random.Generator) -> Draws | None:
    """[DRAWS] percentiles, or means for None, of the values of as many blocks, drawn with replacement.

    None where there are too few values to know how such a figure spreads.
    """
    count, values = len(blocks), np.concatenate([np.empty(0), *blocks])
    tail = 1.0 if percent is None else min(percent, 100 - percent) / 100
    if count < LEAST_BLOCKS or not all(map(len, blocks)) or tail * len(values) < LEAST_TAIL:
        return None
    times_drawn = random.multinomial(count, np.full(count, 1 / count), DRAWS)  # [DRAWS, count]
    sizes = np.array([len(block) for block in blocks])
    if percent is None:
        sums = np.array([block.sum() for block in blocks])
        return Draws(times_drawn @ sums / (times_drawn @ sizes), count)
    order = np.argsort(values, kind="stable")
    values, owners = values[order], np.repeat(np.arange(count), sizes)[order]
    draws = np.empty(DRAWS)
    for draw, weights in enumerate(times_drawn):
        reached = np.cumsum(weights[owners])
        draws[draw] = values[np.searchsorted(reached, percent / 100 * reached[-1])]
    return Draws(draws, count)


def holm(chances: Sequence[float]) -> list[bool]:
    """Which of the differences stand."""
    stand = [False] * len(chances)
    for rank, index in enumerate(sorted(range(len(chances)), key=chances.__getitem__)):
        if chances[index] > LEVEL / (len(chances) - rank):
            break
        stand[index] = True
    return stand


def t_tail(t: float, freedom: int) -> float:
    """The chance of a Student's t of at least `t` or at most -`t`.

    With t = sqrt(freedom) tan(angle) its density is in proportion to cos(angle) ** (freedom - 1).
    """
    angle = math.atan(abs(t) / math.sqrt(freedom))
    return _area(angle, freedom) / _area(0.0, freedom)


@cache
def t_quantile(freedom: int) -> float:
    """What 95 % of Student's t lie within."""
    low, high = 0.0, math.pi / 2  # angles
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if _area(middle, freedom) / _area(0.0, freedom) > LEVEL else (low, middle)
    return math.sqrt(freedom) * math.tan(low)


def _area(angle: float, freedom: int) -> float:
    """The integral of cos ** (freedom - 1) from `angle` to pi / 2, by midpoints."""
    width = (math.pi / 2 - angle) / _POINTS
    middles = angle + width * (np.arange(_POINTS) + 0.5)
    return float((np.cos(middles) ** (freedom - 1)).sum() * width)


def _ratio(difference: float, error: float, freedom: int) -> Ratio:
    """From the difference of two logarithms and its standard error."""
    if error == 0:
        return Ratio(math.exp(difference), math.exp(difference), math.exp(difference), float(difference == 0))
    half = t_quantile(freedom) * error
    low, high = math.exp(difference - half), math.exp(difference + half)
    return Ratio(math.exp(difference), low, high, t_tail(difference / error, freedom))
