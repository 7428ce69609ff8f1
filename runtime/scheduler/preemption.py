"""Who gives way when pages run out, and in what order those come back."""

from __future__ import annotations

import itertools
from collections import deque

import numpy as np

from gapless.runtime.core.plan import Slots
from gapless.runtime.scheduler.batch import Batch
from gapless.runtime.scheduler.request import Request
from gapless.runtime.scheduler.reserve import MAX_PREEMPTIONS, Reserve
from gapless.runtime.scheduler.rows import ENDING, PREEMPTED


class Preemption:
    def __init__(self, batch: Batch, reserve: Reserve, *, by_priority: bool) -> None:
        """`by_priority`: a waiting request makes room for itself at the cost of less urgent ones."""
        self._batch, self._reserve, self._by_priority = batch, reserve, by_priority
        self.preempted: deque[Request] = deque()  # the next to come back first; they keep their slots
        self.count = 0  # preemptions so far

    def before(self, waiting: Request | None) -> Request | None:
        """Of those that can be tried, the next: a preempted request, unless `waiting` is more urgent."""
        if not self.preempted:
            return waiting
        if self._by_priority and waiting is not None and waiting.priority > self.preempted[0].priority:
            return waiting
        # One that still has a step in flight has not given its pages back yet.
        return next((request for request in self.preempted if not request.has_pages), None)

    def resumed(self, request: Request) -> None:
        self.preempted.remove(request)

    def forget(self, request: Request) -> None:
        """The request ends."""
        if request in self.preempted:
            self.preempted.remove(request)

    def relieve(self) -> list[Request]:
        """Running rows lack pages: one row gives way, unless one is on its way out already. Returns who does.

        The oldest of the most urgent rows never does, so that work gets done.
        """
        if self._is_relief_coming():
            return []
        running = [self._batch.request(slot) for slot in self._batch.running.tolist()]
        safe = max(running, key=lambda request: (request.priority, -request.arrival))
        others = [request for request in running if request is not safe]
        if not others:
            self._drop_swapped()
            return []
        self._reserve.preempted()
        request = self.preempt(min(others, key=self._reluctance))
        self._batch.settle(request.slot)
        return [request]

    def preempt(self, request: Request) -> Request:
        """Marks it: it is launched no more, and gives its pages back when nothing of it is in flight."""
        self._batch.rows.flags[request.slot] |= PREEMPTED
        request.preemptions += 1
        self.count += 1
        order = self._order(request)
        place = sum(self._order(other) < order for other in self.preempted)
        self.preempted.insert(place, request)
        return request

    def settle(self) -> None:
        """Preempted rows that no launched step names give their pages back."""
        for request in self.preempted:
            if request.has_pages:
                self._batch.settle(request.slot)

    def make_room(self, request: Request, missing: int) -> list[Request]:
        """A request does not fit for want of so many pages: less urgent ones give way, as few as possible.

        They may be part of the step that is being composed, so they settle later.
        """
        if not self._batch.running.size:
            self._drop_swapped()
        if not self._by_priority or self._is_relief_coming():
            return []
        running = [self._batch.request(slot) for slot in self._batch.running.tolist()]
        lesser = [other for other in running if other.priority < request.priority]
        lesser = [other for other in lesser if other.preemptions < MAX_PREEMPTIONS]
        lesser.sort(key=self._reluctance)
        alone = next((other for other in lesser if self._pages_freed(other) >= missing), None)
        if alone is not None:
            return [self.preempt(alone)]
        freed = list(itertools.accumulate(map(self._pages_freed, lesser)))
        enough = sum(pages < missing for pages in freed) + 1
        return [self.preempt(other) for other in lesser[:enough]] if enough <= len(lesser) else []

    def firm(self, request: Request) -> Slots:
        """Running rows that would not give way to a waiting request, whose growth it must leave room for."""
        batch = self._batch
        if not self._by_priority:
            return batch.running
        slots = batch.running.tolist()
        return np.array([s for s in slots if batch.request(s).priority >= request.priority], np.intp)

    def _reluctance(self, request: Request) -> tuple[bool, int, int, int]:
        """Who gives way first: not one that had to often, then the least urgent, then who loses least, the newest."""
        tired = request.preemptions >= MAX_PREEMPTIONS
        return tired, request.priority, self._tokens_lost(request), -request.arrival

    def _tokens_lost(self, request: Request) -> int:
        """Computed tokens beside those in the tree."""
        rows = self._batch.rows
        return int(rows.launched_len[request.slot]) - request.tree_pages * rows.page_size

    def _pages_freed(self, request: Request) -> int:
        """Pages that nobody else uses, as far as is known without looking at the whole tree."""
        pages = (
            int(self._batch.rows.page_end[request.slot]) // self._batch.rows.page_size - request.tree_pages
        )
        node = request.locked
        while node is not None and node.locks == 1 and node.parent is not None:
            pages += node.end - node.begin
            node = node.parent
        return pages

    def _is_relief_coming(self) -> bool:
        rows, running = self._batch.rows, self._batch.running
        return bool(np.count_nonzero(rows.flags[running] & (ENDING | PREEMPTED)))

    def _order(self, request: Request) -> tuple[int, int]:
        return -request.priority if self._by_priority else 0, request.arrival

    def _drop_swapped(self) -> None:
        """Nothing else can give pages: the last of those swapped out gives up its prefix, and will be computed anew."""
        swapped = [request for request in self.preempted if request.swapped is not None]
        if swapped:
            self._batch.forget_swapped(swapped[-1])
