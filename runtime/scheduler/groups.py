"""Groups of requests, such as those of one program, and the prefixes that they hold in the cache between their calls.

A hold keeps a prompt's pages from being evicted before the branches come that continue it. It is a hint, and hurts
nobody who does not give it: all holds together keep at most a share of the pool, they end some time after the group's
last request, and they are given up, oldest first, before a request waits or is preempted for want of pages.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from dataclasses import dataclass, field

import numpy as np

from gapless.radix_cache.cache import PrefixCache
from gapless.radix_cache.namespace import Namespace
from gapless.radix_cache.tree import Node, RadixTree
from gapless.runtime.core.plan import I32

LEASE_S = 60.0  # a group that has had no request for so long holds nothing any more
SHARE = 2  # of so many pages of the pool, holds keep one at most
MOST_HOLDS = 16384  # of which each costs some memory, even where all hold the same pages


@dataclass(eq=False)
class Group:
    name: str
    live: int = 0  # requests that have not left
    used: float = 0.0  # when a request last came or ended, by the clock
    released: bool = False  # its requests that still run hold nothing when they end
    # By the end of their paths in the cache, oldest first: the end of the same path in the index.
    holds: dict[Node, Node] = field(default_factory=dict)


class Groups:
    def __init__(self, cache: PrefixCache) -> None:
        self._cache = cache
        self.clock = time.monotonic
        self._named: dict[str, Group] = {}  # those that have live requests or hold something
        self._holding: OrderedDict[Group, None] = OrderedDict()  # the one that was used last comes last
        self._holds = 0
        # All that is held, without its pages: so that what several hold counts once.
        self._index = RadixTree(cache.page_size)

    @property
    def pages(self) -> int:
        """Pages that are held, whether or not requests use them, too."""
        return self._index.protected

    def join(self, name: str) -> Group | None:
        """A request of the group has come; None where the name is empty."""
        if not name:
            return None
        group = self._named.setdefault(name, Group(name))
        group.live += 1
        self._use(group)
        return group

    def leave(self, group: Group | None) -> None:
        """A request of the group has ended and will hold nothing any more."""
        if group is None:
            return
        group.live -= 1
        self._use(group)
        self._forget(group)

    def hold(self, group: Group, ids: I32, namespace: Namespace) -> None:
        """Keeps `ids`: whole pages that are in the cache, locked by the caller."""
        if group.released:
            return
        node = self._cache.lock(self._cache.match(ids, namespace))
        if node in group.holds:
            self._cache.unlock(node)
            return
        no_pages = np.zeros(len(ids) // self._cache.page_size, np.int32)
        group.holds[node], _ = self._index.insert(ids, no_pages, namespace)
        self._index.lock_node(group.holds[node])
        self._holds += 1
        self._holding[group] = None
        self._use(group)
        while self.pages > self._cache.total_pages // SHARE or self._holds > MOST_HOLDS:
            self._give_up_oldest()

    def release(self, name: str) -> None:
        group = self._named.get(name)
        if group is not None:
            group.released = True
            while group.holds:
                self._give_up(group)
            del self._named[name]

    def missing(self, pages: int) -> int:
        """How many of so many pages are not available, once holds have been given up for them; 0 or less: none."""
        while self._holding and self._cache.available < pages:
            self._give_up_oldest()
        return pages - self._cache.available

    def expire(self) -> None:
        """Gives up what has outlived its lease; to be called all the time."""
        if not self._holding:
            return
        oldest = self.clock() - LEASE_S
        while self._holding and (group := next(iter(self._holding))).used <= oldest:
            if group.live:
                self._use(group)
            else:
                self._give_up(group)

    def clear(self) -> None:
        """Gives up all holds."""
        while self._holding:
            self._give_up_oldest()

    def _use(self, group: Group) -> None:
        group.used = self.clock()
        if group in self._holding:
            self._holding.move_to_end(group)

    def _give_up_oldest(self) -> None:
        self._give_up(next(iter(self._holding)))

    def _give_up(self, group: Group) -> None:
        """The group's oldest hold."""
        node = next(iter(group.holds))
        self._cache.unlock(node)
        self._index.unlock(group.holds.pop(node))
        self._index.evict(self._index.evictable)
        self._holds -= 1
        if not group.holds:
            del self._holding[group]
            self._forget(group)

    def _forget(self, group: Group) -> None:
        """Drops the group if nothing is left of it."""
        if not group.live and not group.holds and not group.released:
            del self._named[group.name]
