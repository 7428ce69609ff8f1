"""Which unused prefix goes first.

A strategy keeps the tree's unlocked nodes in levels: the lowest level goes first, and within a level the node that was
released first (least recently used). A release puts a node behind its children, and no strategy gives a node a lower
level than one of its children; so the first node of all has no children, and eviction needs no search: adding, removing
and taking the first each cost a constant, and the logarithm of the number of levels where a level comes or goes.
"""

from __future__ import annotations

from collections import OrderedDict
from heapq import heappop, heappush
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gapless.radix_cache.tree import Node


class LeastRecentlyUsed:
    """The order of release. The other strategies differ in `level` alone, or almost."""

    def __init__(self) -> None:
        self._levels: dict[int, OrderedDict[Node, None]] = {}  # none is empty
        self._numbers: list[int] = []  # a heap with each level, and some that are gone

    def level(self, node: Node) -> int:
        """May change only while the node is locked, and never falls below that of a child."""
        return 0

    def add(self, node: Node) -> None:
        """The node was released; its unlocked children were added before."""
        node.level = level = self.level(node)
        nodes = self._levels.get(level)
        if nodes is None:
            nodes = self._levels[level] = OrderedDict()
            if len(self._numbers) > 2 * len(self._levels) + 8:
                self._numbers = sorted(self._levels)
            else:
                heappush(self._numbers, level)
        nodes[node] = None

    def remove(self, node: Node) -> None:
        """The node was locked."""
        nodes = self._levels[node.level]
        del nodes[node]
        if not nodes:
            del self._levels[node.level]

    def pop(self) -> Node | None:
        """Removes the node to evict next, if there is any."""
        while self._numbers:
            level = self._numbers[0]
            nodes = self._levels.get(level)
            if nodes is not None:
                node, _ = nodes.popitem(last=False)
                if not nodes:
                    del self._levels[level]
                return node
            heappop(self._numbers)
        return None


class LeastFrequentlyUsed(LeastRecentlyUsed):
    """The fewest requests; equal ones by recency. Constant time as by Shah, Mitra and Matani (2010)."""

    def level(self, node: Node) -> int:
        return node.uses


class SegmentedLru(LeastRecentlyUsed):
    """Prefixes that a second request used outlive those of one (Karedla, Love and Wherry 1994).

    The protected segment has a bound, four nodes of five: beyond it the least recently used one falls back to the end
    of the other segment, where it needs one more use to be protected again.
    """

    def level(self, node: Node) -> int:
        return int(node.uses > 1)

    def pop(self) -> Node | None:
        protected, others = self._levels.get(1, ()), self._levels.get(0, ())
        if len(protected) > 4 * len(others):
            node = next(iter(protected))
            self.remove(node)
            node.uses = 1
            self.add(node)
        return super().pop()


class LowestPriority(LeastRecentlyUsed):
    """The lowest priority among the requests that used it; equal ones by recency."""

    def level(self, node: Node) -> int:
        return node.priority


class FirstInFirstOut(LeastRecentlyUsed):
    """The oldest; a prefix counts as of the age of the newest that continues it."""

    def level(self, node: Node) -> int:
        return node.newest


STRATEGIES: dict[str, type[LeastRecentlyUsed]] = {
    "lru": LeastRecentlyUsed,
    "lfu": LeastFrequentlyUsed,
    "slru": SegmentedLru,
    "priority": LowestPriority,
    "fifo": FirstInFirstOut,
}
