"""The highest rate at which a server keeps its promises."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

Figures = dict[str, Any]
CLOSE = 0.05  # relative width of the bracket at which the search ends
MAX_RUNS = 12
ALONE = 0.25  # mean requests at a time: with fewer, hardly any two meet, and a lower rate changes nothing


@dataclass(slots=True)
class Found:
    """`rate` in requests/s: the highest that held; 0 where none did, infinite where sending all at once did."""

    rate: float
    runs: list[Figures]


async def find_max_rate(measure: Callable[[float], Awaitable[Figures]], share: float) -> Found:
    """Bisection. `measure(rate)` makes a run and returns its figures, of which `goodput_share` is compared.

    The first run sends all at once: what it reaches bounds what the server can do. The bracket is then widened upwards
    as long as its end holds, and halved until it is close, or requests that hardly meet fail, too. Runs are noisy near
    the limit: see all of them in `runs`.
    """
    runs = [await measure(float("inf"))]

    async def holds(rate: float) -> bool:
        runs.append(await measure(rate))
        return _holds(runs[-1], share)

    if _holds(runs[0], share):
        return Found(float("inf"), runs)
    low, high = 0.0, float(runs[0]["request_throughput"])
    if not high:
        return Found(0.0, runs)
    while len(runs) < MAX_RUNS and await holds(high):
        low, high = high, 2 * high
    while len(runs) < MAX_RUNS and high - low > CLOSE * high:
        middle = (low + high) / 2
        if await holds(middle):
            low = middle
        else:
            high = middle
            if runs[-1]["concurrency"] < ALONE:
                break
    return Found(low, runs)


def _holds(figures: Figures, share: float) -> bool:
    good = figures["goodput_share"]
    return good is not None and good >= share
