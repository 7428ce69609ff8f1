"""Fixtures for tests that run real processes. Every wait is bounded; nothing sleeps to synchronise."""

import os
import select
from collections.abc import Callable, Iterator

import pytest


class Watched:
    """A process of any parent, known by a descriptor, so that its number cannot come to mean another one."""

    def __init__(self, pid: int) -> None:
        self.pid, self._fd = pid, os.pidfd_open(pid)

    def within(self, seconds: float) -> bool:
        """True when the process ends within the time."""
        return bool(select.select([self._fd], [], [], seconds)[0])

    def close(self) -> None:
        os.close(self._fd)


@pytest.fixture
def watch() -> Iterator[Callable[[int], Watched]]:
    watched: list[Watched] = []

    def start(pid: int) -> Watched:
        watched.append(Watched(pid))
        return watched[-1]

    yield start
    for item in watched:
        item.close()
