"""How a run is coming along, on one line of stderr."""

from __future__ import annotations

import math
import shutil
import sys
import time
from collections import deque
from collections.abc import Callable
from typing import TextIO

from gapless.bench.serve.metrics import bucket
from gapless.bench.serve.record import Record

TTY_SECONDS = 0.2  # between two lines
FILE_SECONDS = 10.0  # where each line stays
RECENT_SECONDS = 5.0  # that tokens/s is of


class Progress:
    """Counts on each call; `tick`, called now and then, prints when it is time: over the last line on a terminal.

    `total` is the number of requests; with `duration` (seconds), the run ends then if not before. All times are those
    of `clock`.
    """

    def __init__(
        self,
        total: int,
        duration: float = math.inf,
        *,
        enabled: bool = True,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._total, self._duration, self._enabled = total, duration, enabled
        self._stream, self._clock = stream or sys.stderr, clock
        self._tty = self._stream.isatty()
        self._sent = self._done = self._failed = self._tokens = 0
        self._began = self._printed = clock()
        self._recent = deque(
            [(self._began, 0)]
        )  # when, and tokens so far; the first is RECENT_SECONDS old or older

    def started(self) -> None:
        self._sent += 1

    def chunk(self, tokens: int) -> None:
        self._tokens += tokens

    def finished(self, record: Record) -> None:
        self._done += 1
        self._failed += bucket(record) == "failed"

    def tick(self, now: float) -> None:
        if self._enabled and now - self._printed >= (TTY_SECONDS if self._tty else FILE_SECONDS):
            self._print(now, "" if self._tty else "\n")

    def close(self) -> None:
        """The last line, which stays."""
        if self._enabled:
            self._print(self._clock(), "\n")

    def _print(self, now: float, end: str) -> None:
        line = self._line(now)
        if self._tty:
            line = "\r\x1b[K" + line[: shutil.get_terminal_size().columns - 1]
        self._stream.write(line + end)
        self._stream.flush()
        self._printed = now

    def _line(self, now: float) -> str:
        return (
            f"{self._done}/{self._total} done, {self._sent - self._done} running, {self._failed} failed, "
            f"{self._rate(now):.0f} tokens/s, {_clock(now - self._began)} gone, {_clock(self._left(now))} left"
        )

    def _rate(self, now: float) -> float:
        """Tokens a second of late."""
        recent = self._recent
        recent.append((now, self._tokens))
        while recent[1][0] <= now - RECENT_SECONDS:
            recent.popleft()
        then, before = recent[0]
        return (self._tokens - before) / (now - then) if now > then else 0.0

    def _left(self, now: float) -> float:
        """Seconds to the end, if requests go on ending as fast as they did so far; infinite before the first has."""
        gone = now - self._began
        rest = (self._total - self._done) * gone / self._done if self._done else math.inf
        return max(0.0, min(rest, self._duration - gone))


def _clock(seconds: float) -> str:
    if not math.isfinite(seconds):
        return "-"
    return f"{int(seconds) // 60}:{int(seconds) % 60:02}"
