"""How much of the time a device works: from a torch profiler's trace, and from the steps' own events."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Any

_WORK = ("kernel", "gpu_memcpy", "gpu_memset")  # categories of events on the device
Span = tuple[float, float]  # start and end


class StepTimes:
    """A Recorder that keeps when the steps ran."""

    def __init__(self) -> None:
        self.spans: list[Span] = []

    def phase(self, name: str, start: float, end: float) -> None:
        pass

    def step(self, number: int, start: float, end: float) -> None:
        self.spans.append((start, end))

    def summary(self) -> dict[str, float]:
        """Of the steps so far: the median step, and the share of the time between them; then forgets them."""
        spans, self.spans = self.spans, []
        return {
            "steps": len(spans),
            "step_us_median": 1e6 * statistics.median(end - start for start, end in spans),
            "idle_share_between_steps": idle_share(spans),
        }


def device_spans(trace: Path) -> list[Span]:
    """When the device worked, in microseconds, from a trace in Chrome's format as torch.profiler exports it."""
    events: list[dict[str, Any]] = json.loads(trace.read_bytes())["traceEvents"]
    return [(event["ts"], event["ts"] + event["dur"]) for event in events if event.get("cat") in _WORK]


def idle_share(spans: Iterable[Span]) -> float:
    """The share of the time from the first start to the last end in which no span was open."""
    ordered = sorted(spans)
    if not ordered:
        return 1.0
    first, until, idle = ordered[0][0], ordered[0][1], 0.0
    for start, end in ordered:
        idle += max(0.0, start - until)
        until = max(until, end)
    return idle / (until - first) if until > first else 0.0
