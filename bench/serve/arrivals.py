"""When the requests of a load are due, and how many may be on their way."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from gapless.bench.serve.record import Item
from gapless.runtime.core.config import flag
from gapless.runtime.core.errors import ConfigError

_STREAM = 1  # the seed's stream of random numbers for gaps: what a dataset draws is independent of them


@dataclass(frozen=True)
class RampUp:
    """A rate that goes from `start` to `end` requests/s over the requests of a load."""

    strategy: Literal["linear", "exponential"]
    start: float
    end: float

    def rates(self, count: int) -> NDArray[np.float64]:
        """[count - 1], requests/s: that of the gap before each request but the first."""
        progress = np.arange(1, count) / max(count - 1, 1)
        if self.strategy == "linear":
            return self.start + (self.end - self.start) * progress
        return self.start * (self.end / self.start) ** progress


def schedule(
    count: int, *, rate: float, burstiness: float = 1.0, ramp_up: RampUp | None = None, seed: int
) -> NDArray[np.float64]:
    """[count], seconds since the start at which requests are due; the first is due at 0.

    Gaps are gamma-distributed with shape `burstiness` and mean 1 / rate, as in vLLM's benchmark: 1 is a Poisson
    process, less comes in bursts, inf is regular. Their sum is not scaled to count / rate, which vLLM does: a Poisson
    process stays one. An infinite rate sends all at once; `ramp_up` takes the place of `rate`.
    """
    gaps = np.ones(max(count - 1, 0))
    if math.isfinite(burstiness):
        gaps = np.random.default_rng((seed, _STREAM)).standard_gamma(burstiness, len(gaps)) / burstiness
    due = np.zeros(count)
    np.cumsum(gaps / (ramp_up.rates(count) if ramp_up else rate), out=due[1:])
    return due


def due_times(
    items: Sequence[Item], *, rate: float, burstiness: float = 1.0, ramp_up: RampUp | None = None, seed: int
) -> NDArray[np.float64]:
    """[items], seconds since the start: a trace's own times, else the schedule's; NaN for what follows an answer."""
    due = np.array([np.nan if item.at is None else item.at for item in items], np.float64)
    scheduled = np.array([item.at is None and item.after is None for item in items], np.bool_)
    count = int(scheduled.sum())
    due[scheduled] = schedule(count, rate=rate, burstiness=burstiness, ramp_up=ramp_up, seed=seed)
    return due


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("arrivals")

    def number(name: str, kind: type, default: float | None, help: str) -> None:
        help += "" if default is None else f" (default: {default:g})"
        group.add_argument(flag(name), type=kind, default=default, metavar=kind.__name__.upper(), help=help)

    number("request_rate", float, math.inf, "requests/s; inf: all at once. A trace's own times override it")
    number(
        "burstiness",
        float,
        1.0,
        "shape of the gamma distribution of the gaps, whose mean is 1 / rate; 1: Poisson, less: bursts, inf: regular",
    )
    group.add_argument(
        "--ramp-up-strategy",
        choices=("linear", "exponential"),
        help="instead of a request rate: with p = i / (n - 1), the gap before request i of n has the rate "
        "start + (end - start) * p, or start * (end / start)**p",
    )
    number("ramp_up_start_rps", float, None, "requests/s at the beginning")
    number("ramp_up_end_rps", float, None, "requests/s at the end")
    number(
        "max_concurrency",
        int,
        None,
        "requests on their way at once; one that is due waits until there is room",
    )
    number("duration", float, None, "seconds after which the run ends, whatever is still running")
    number("warmup_requests", int, 1, "requests sent before the run and left out of its figures")


def check(parsed: argparse.Namespace) -> None:
    """Raises ConfigError naming the option that is wrong."""
    for name in ("request_rate", "burstiness"):
        value = getattr(parsed, name)
        if not value > 0:
            raise ConfigError(f"{flag(name)} {value:g}: must be above 0")
    if parsed.max_concurrency is not None and parsed.max_concurrency < 1:
        raise ConfigError(f"--max-concurrency {parsed.max_concurrency}: must be at least 1")
    if parsed.duration is not None and not 0 < parsed.duration < math.inf:
        raise ConfigError(f"--duration {parsed.duration:g}: must be above 0 and finite")
    if parsed.warmup_requests < 0:
        raise ConfigError(f"--warmup-requests {parsed.warmup_requests}: must be at least 0")
    _check_ramp_up(parsed)


def ramp_up_from(parsed: argparse.Namespace) -> RampUp | None:
    """What the checked options ask for."""
    if parsed.ramp_up_strategy is None:
        return None
    return RampUp(parsed.ramp_up_strategy, parsed.ramp_up_start_rps, parsed.ramp_up_end_rps)


def _check_ramp_up(parsed: argparse.Namespace) -> None:
    strategy, start, end = parsed.ramp_up_strategy, parsed.ramp_up_start_rps, parsed.ramp_up_end_rps
    if strategy is None:
        if start is not None or end is not None:
            raise ConfigError("--ramp-up-start-rps and --ramp-up-end-rps need --ramp-up-strategy")
        return
    if start is None or end is None:
        raise ConfigError("--ramp-up-strategy needs --ramp-up-start-rps and --ramp-up-end-rps")
    if math.isfinite(parsed.request_rate):
        raise ConfigError("--request-rate and --ramp-up-strategy both set the rate: give one")
    if not 0 <= start <= end < math.inf or end == 0:
        raise ConfigError(
            f"--ramp-up-start-rps {start:g}, --ramp-up-end-rps {end:g}: the rate must not fall, and end above 0"
        )
    if strategy == "exponential" and start == 0:
        raise ConfigError("--ramp-up-start-rps 0: an exponential ramp must start above 0")
