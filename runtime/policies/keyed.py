"""The queue of every policy whose order is a number that a request has for good."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic

from gapless.runtime.policies.base import W
from gapless.runtime.policies.heap import Key, LazyHeap


class KeyedQueue(Generic[W]):
    """The least key first. A request that was removed and comes back has its old place."""

    def __init__(self, key: Callable[[W], Key]) -> None:
        self._key = key
        self._heap: LazyHeap[W] = LazyHeap()

    def push(self, request: W) -> None:
        self._heap.push(request, self._key(request))

    def remove(self, request: W, *, admitted: bool) -> None:
        self._heap.remove(request)

    def first(self) -> W | None:
        return self._heap.first()

    def turn(self) -> None:
        pass

    def __len__(self) -> int:
        return len(self._heap)
