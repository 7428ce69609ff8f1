"""A trace of the loop's phases and the device's steps, in Chrome's format: open it in any trace viewer."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Protocol

from gapless.runtime.core.errors import ConfigError

FLUSH_S = 0.25
_LOOP, _DEVICE = 1, 2
_TRACKS = {_LOOP: "scheduler loop", _DEVICE: "device"}


class Recorder(Protocol):
    """Hears what the loop does. Times are of time.perf_counter(), in seconds."""

    def phase(self, name: str, start: float, end: float) -> None:
        """A phase of the loop: idle, receive, late, plan, launch, wait, retire or send."""
        ...

    def step(self, number: int, start: float, end: float) -> None:
        """The device ran launch `number` from start to end."""
        ...


class Trace:
    """A Recorder that writes to `path`, about 1 kB a step; times there are microseconds since it was made.

    The file is a whole JSON array after each flush, so that it can be read even where the process is killed.
    """

    def __init__(self, path: Path) -> None:
        try:
            self._file = path.open("wb")
        except OSError as error:
            raise ConfigError(f"--trace {path}: {error.strerror}", param="trace") from error
        self._begin = self._flushed = time.perf_counter()
        names = [
            {"ph": "M", "pid": 1, "tid": track, "name": "thread_name", "args": {"name": name}}
            for track, name in _TRACKS.items()
        ]
        self._file.write(json.dumps(names).encode())
        self._pending: list[str] = []

    def phase(self, name: str, start: float, end: float) -> None:
        self._span(_LOOP, name, start, end)

    def step(self, number: int, start: float, end: float) -> None:
        self._span(_DEVICE, f"step {number}", start, end)

    def flush(self) -> None:
        """Writes what has come over the closing bracket."""
        self._file.seek(-1, 2)
        self._file.write(("".join(self._pending) + "]").encode())
        self._file.flush()
        self._pending.clear()

    def close(self) -> None:
        self.flush()
        self._file.close()

    def _span(self, track: int, name: str, start: float, end: float) -> None:
        at, length = (start - self._begin) * 1e6, (end - start) * 1e6
        self._pending.append(
            f',\n{{"ph":"X","pid":1,"tid":{track},"name":"{name}","ts":{at:.1f},"dur":{length:.1f}}}'
        )
        if end - self._flushed > FLUSH_S:
            self._flushed = end
            self.flush()
