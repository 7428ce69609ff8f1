"""A heap whose items can be taken out from anywhere."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from typing import Generic, TypeVar

Item = TypeVar("Item")
Key = tuple[int, ...]


class LazyHeap(Generic[Item]):
    """Items by key, the least first. What is removed leaves a dead entry, which goes when it comes to the top.

    Once more than half of the entries are dead all of those are dropped: that costs O(n) once in n removals. So a call
    costs O(log n) on average, and dead entries keep no more removed items alive than the heap has live ones.
    """

    def __init__(self) -> None:
        self._entries: list[tuple[Key, int, Item]] = []
        self._serials: dict[Item, int] = {}  # of the one entry of each item that is alive
        self._pushes = 0

    def push(self, item: Item, key: Key) -> None:
        assert item not in self._serials, "it is in the heap already"
        self._pushes += 1
        self._serials[item] = self._pushes
        heapq.heappush(self._entries, (key, self._pushes, item))

    def remove(self, item: Item) -> None:
        assert item in self._serials, "it is not in the heap"
        del self._serials[item]
        if len(self._entries) > 2 * len(self._serials):
            self._entries = [entry for entry in self._entries if self._is_live(entry)]
            heapq.heapify(self._entries)

    def first(self) -> Item | None:
        while self._entries:
            if self._is_live(self._entries[0]):
                return self._entries[0][2]
            heapq.heappop(self._entries)
        return None

    def _is_live(self, entry: tuple[Key, int, Item]) -> bool:
        return self._serials.get(entry[2]) == entry[1]

    def __contains__(self, item: Item) -> bool:
        return item in self._serials

    def __iter__(self) -> Iterator[Item]:
        """In the order of pushing."""
        return iter(self._serials)

    def __len__(self) -> int:
        return len(self._serials)
