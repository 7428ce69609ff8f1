"""The limits of a service: what a request must keep to count as good."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from gapless.runtime.core.errors import ConfigError

NAMES = {"ttft": "ttft", "tpot": "tpot", "e2e": "e2e", "e2el": "e2e"}


@dataclass(frozen=True, slots=True)
class Goodput:
    """Limits in milliseconds, all of which a request must keep; None sets none."""

    ttft: float | None = None
    tpot: float | None = None
    e2e: float | None = None

    def limits(self) -> dict[str, float]:
        return {name: limit for name, limit in asdict(self).items() if limit is not None}

    def met(self, ttft: float | None, tpot: float | None, e2e: float) -> bool:
        """Whether these latencies, in seconds, are within every limit.

        A request without a second token has no TPOT and keeps that limit; one without a first misses its TTFT.
        """
        if ttft is None and self.ttft is not None:
            return False
        pairs = (self.ttft, ttft), (self.tpot, tpot), (self.e2e, e2e)
        return all(limit is None or value is None or 1000 * value <= limit for limit, value in pairs)


def parse_goodput(pairs: Sequence[str]) -> Goodput:
    """`["ttft:500", "tpot:50"]` as limits; raises ConfigError naming the pair that is wrong."""
    limits: dict[str, float] = {}
    for pair in pairs:
        name, colon, value = pair.partition(":")
        if not colon or name not in NAMES:
            raise ConfigError(f"--goodput {pair}: not NAME:MILLISECONDS with one of {', '.join(NAMES)}")
        if NAMES[name] in limits:
            raise ConfigError(f"--goodput {pair}: {NAMES[name]} has a limit already")
        limits[NAMES[name]] = _milliseconds(pair, value)
    if not limits:
        raise ConfigError("--goodput: no limit is given; for example ttft:500 tpot:50")
    return Goodput(**limits)


def _milliseconds(pair: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value < float("inf"):
        raise ConfigError(f"--goodput {pair}: {text!r} is not a number of milliseconds above 0")
    return value
