"""The running requests and what they own. Slots and pages are taken and given back here and nowhere else."""

from __future__ import annotations

from collections import deque

import numpy as np

from gapless.radix_cache.cache import PrefixCache
from gapless.runtime.core.plan import I32, Slots
from gapless.runtime.scheduler.request import Request
from gapless.runtime.scheduler.rows import ENDING, KEPT, PREEMPTED, Rows

_NO_SLOTS: Slots = np.empty(0, np.intp)
_NO_UPDATES: I32 = np.empty((3, 0), np.int32)


class Batch:
    def __init__(self, slots: int, context_length: int, cache: PrefixCache) -> None:
        self.rows = Rows(slots, context_length, cache.page_size)
        self.cache = cache
        self.running: Slots = _NO_SLOTS  # slots that hold pages, by arrival of their requests
        self._requests: list[Request | None] = [None] * (slots + 1)
        self._updates: list[I32] = []  # [3, n] each: slots, columns, pages
        self.launched_step = 0
        self.retired_step = 0
        # Pages that a launched step may still read, with the number of the last such step.
        self._deferred: deque[tuple[int, I32]] = deque()

    def request(self, slot: int) -> Request:
        request = self._requests[slot]
        assert request is not None, f"slot {slot} is free"
        return request

    def is_live(self, slot: int) -> bool:
        """Whether a request has the slot and has not ended."""
        return self._requests[slot] is not None and not self.rows.has(slot, ENDING)

    def is_idle(self) -> bool:
        return self.rows.free_slots == len(self._requests) - 1

    def start(self, request: Request, reserve_pages: int) -> bool:
        """Matches, locks and takes pages for all known tokens of a new or preempted request.

        False, with nothing changed, unless `reserve_pages` would still be available afterwards.
        """
        rows, cache, size = self.rows, self.cache, self.cache.page_size
        known = rows.known(request.slot) if request.slot else request.prompt
        # At least one token is computed, for there must be logits to sample from.
        match = cache.match(known[:-1], request.namespace)
        matched = len(match.pages)
        locked = cache.lock(match)
        wanted = -(-len(known) // size) - matched
        if wanted + reserve_pages > cache.available:
            cache.unlock(locked)
            return False
        request.locked, request.tree_pages = locked, matched
        if not request.slot:
            self._open(request, matched * size)
        slot = request.slot
        rows.begin(slot, matched * size)
        pages = np.concatenate([match.pages, cache.take(wanted)])
        self._add_pages(np.full(len(pages), slot, np.intp), np.arange(len(pages), dtype=np.int32), pages)
        running, place = self.running, len(self.running)
        if place and rows.arrival[running[-1]] > request.arrival:  # it comes back from preemption
            place = int(np.searchsorted(rows.arrival[running], request.arrival))
        self.running = np.concatenate([running[:place], np.array([slot], np.intp), running[place:]])
        return True

    def _open(self, request: Request, cached_tokens: int) -> None:
        slot = self.rows.open(request.submit, request.max_output, constrained=request.grammar is not None)
        self.rows.arrival[slot] = request.arrival
        self._requests[slot] = request
        request.slot, request.generation = slot, int(self.rows.generation[slot])
        request.cached_tokens = cached_tokens

    def grow(self, slots: Slots) -> None:
        """Gives each of `slots` one more page."""
        columns = self.rows.page_end[slots] // self.cache.page_size
        self._add_pages(slots, columns, self.cache.take(len(slots)))

    def take_updates(self) -> I32:
        """Changes of the page table since the last call, in order: [3, U], slots, columns and pages."""
        updates, self._updates = self._updates, []
        if len(updates) == 1:
            return updates[0]
        return np.concatenate(updates, axis=1) if updates else _NO_UPDATES

    def publish(self, slot: int) -> None:
        """Puts the row's computed whole pages into the tree, so that others can match them while it runs.

        Where the tree has such pages already, the row's table is rewritten to them and its own are freed once the steps
        that may read them have retired.
        """
        rows, request, size = self.rows, self.request(slot), self.cache.page_size
        count = rows.cacheable_len(slot) // size
        if not self.cache.enabled or count <= request.tree_pages:
            return
        assert request.locked is not None
        own = rows.page_table[slot, :count].copy()
        request.locked, kept = self.cache.publish(
            rows.known(slot)[: count * size], own, request.namespace, request.locked
        )
        request.tree_pages = count
        columns = np.flatnonzero(own != kept).astype(np.int32)
        if columns.size:
            rows.page_table[slot, columns] = kept[columns]
            self._update(slot, columns, kept[columns])
            self._deferred.append((self.launched_step, own[columns]))
            self.retired(self.retired_step)

    def settle(self, slot: int) -> None:
        """Gives back what an ending or preempted row holds, if no launched step names it. Safe to call at any time."""
        rows, request = self.rows, self._requests[slot]
        if request is None or rows.in_flight[slot] or not rows.has(slot, ENDING | PREEMPTED):
            return
        if request.locked is not None:
            self.publish(slot)
            self.cache.unlock(request.locked)
            pages = int(rows.page_end[slot]) // self.cache.page_size
            self.cache.give_back(rows.page_table[slot, request.tree_pages : pages])
            request.locked, request.tree_pages, rows.page_end[slot] = None, 0, 0
            rows.flags[slot] &= ~KEPT & 255
            self.running = self.running[self.running != slot]
        if rows.has(slot, ENDING):
            self._requests[slot] = None
            rows.close(slot)

    def retired(self, step: int) -> None:
        """The device has finished `step`: pages that only it or earlier ones could read are free."""
        self.retired_step = step
        while self._deferred and self._deferred[0][0] <= step:
            self.cache.give_back(self._deferred.popleft()[1])

    def check_idle(self) -> None:
        """The accounting at rest: raises AssertionError unless all slots and pages are back."""
        assert self.is_idle() and not self.running.size and not self._deferred, (
            "slots or pages are still held"
        )
        assert not self.rows.in_flight.any(), "a step is counted as in flight"
        self.cache.check_idle()

    def _add_pages(self, slots: Slots, columns: I32, pages: I32) -> None:
        self.rows.set_pages(slots, columns, pages)
        self._update(slots, columns, pages)

    def _update(self, slots: Slots | int, columns: I32, pages: I32) -> None:
        update = np.empty((3, len(pages)), np.int32)
        update[0], update[1], update[2] = slots, columns, pages
        self._updates.append(update)
