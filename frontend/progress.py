"""A bar on stderr for batches."""

from __future__ import annotations

import sys
import time
from contextlib import suppress

_WIDTH = 30
_SECONDS = 0.1  # between two looks of it


class ProgressBar:
    def __init__(self, total: int) -> None:
        self._total, self._done, self._failed = total, 0, 0
        self._begin = time.monotonic()
        self._shown = -_SECONDS

    def advance(self, failed: bool) -> None:
        self._done += 1
        self._failed += failed
        now = time.monotonic() - self._begin
        if now - self._shown >= _SECONDS or self._done == self._total:
            self._shown = now
            # Where stderr is missing, broken or closed, the batch goes on without a bar.
            with suppress(OSError, ValueError):
                self._write(now)

    def _write(self, seconds: float) -> None:
        filled = _WIDTH * self._done // self._total
        failures = f", {self._failed} failed" if self._failed else ""
        end = "\n" if self._done == self._total else ""
        if sys.stderr is None:
            return
        sys.stderr.write(
            f"\r[{'#' * filled}{'.' * (_WIDTH - filled)}] {self._done}/{self._total}{failures}, "
            f"{self._done / seconds if seconds else 0:.1f}/s, {seconds:.1f} s{end}"
        )
        sys.stderr.flush()
