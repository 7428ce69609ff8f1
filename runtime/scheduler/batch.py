"""The running requests and what they own. Slots and pages are taken and given back here and nowhere else."""

from __future__ import annotations

from collections import deque

import numpy as np

from gapless.radix_cache.cache import PrefixCache
from gapless.runtime.core.plan import I32, Copy, Slots
from gapless.runtime.scheduler.groups import Groups
from gapless.runtime.scheduler.request import Request
from gapless.runtime.scheduler.rows import ENDING, KEPT, PREEMPTED, Rows
from gapless.runtime.scheduler.swap import Swapped, SwapSpace

_NO_SLOTS: Slots = np.empty(0, np.intp)
_NO_UPDATES: I32 = np.empty((3, 0), np.int32)


class Batch:
    def __init__(self, slots: int, context_length: int, cache: PrefixCache, swap: SwapSpace) -> None:
        self.rows = Rows(slots, context_length, cache.page_size)
        self.cache = cache
        self.groups = Groups(cache)
        self.swap = swap
        # For the next plan. A page that a copy reads or writes may change hands before that is launched: whoever gets
        # it writes it in that plan or a later one, and a plan copies first, in order.
        self._copies: list[Copy] = []
        self.running: Slots = _NO_SLOTS  # slots that hold pages, by arrival of their requests
        self._requests: list[Request | None] = [None] * (slots + 1)
        self.scored: dict[int, Request] = {}  # by slot, those that ask for log probabilities or an embedding
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

    def start(self, request: Request, reserve_pages: int) -> int:
        """Matches, locks and takes pages for all known tokens of a new or preempted request.

        Returns 0; or, with nothing changed, how many pages are missing for `reserve_pages` to be available afterwards.
        """
        rows, cache, size = self.rows, self.cache, self.cache.page_size
        known = rows.known(request.slot) if request.slot else request.prompt
        if not request.slot:
            request.space = request.under(cache.version)
        whole = request.unscored == len(request.prompt)
        match = cache.match(known[:-1] if whole else known[: request.shareable], request.space)
        locked = cache.lock(match, request.priority)
        wanted = -(-len(known) // size) - match.length
        missing = self.groups.missing(wanted + reserve_pages)
        if missing > 0:
            cache.unlock(locked)
            return missing
        pages = np.concatenate([match.pages, cache.take(wanted)])
        cached_len = self._copy_in(request, match.length, pages) or match.length * size
        request.locked, request.tree_pages, request.has_pages = locked, match.length, True
        if not request.slot:
            self._open(request, cached_len)
        slot = request.slot
        rows.begin(slot, cached_len)
        self._add_pages(np.full(len(pages), slot, np.intp), np.arange(len(pages), dtype=np.int32), pages)
        running, place = self.running, len(self.running)
        if place and rows.arrival[running[-1]] > request.arrival:  # it comes back from preemption
            place = int(np.searchsorted(rows.arrival[running], request.arrival))
        self.running = np.concatenate([running[:place], np.array([slot], np.intp), running[place:]])
        return 0

    def _copy_in(self, request: Request, matched: int, pages: I32) -> int:
        """Fills some of `pages` after the matched ones by copying; how many tokens need no computing then, or 0.

        From the host, where the request was swapped out to; or, for one of n samples, from the first one's partly
        filled page: the rest of the prompt before its last token.
        """
        size = self.cache.page_size
        if request.swapped is not None:
            swapped = request.swapped
            source = swapped.pages[matched - swapped.first :]
            if source.size:
                self._copies.append(Copy("in", source, pages[matched : matched + source.size]))
            self.forget_swapped(request)
            return max(swapped.length, matched * size)
        leader, length = request.leader, len(request.prompt) - 1
        if request.slot or leader is None or not length % size or length // size != matched:
            return 0
        if request.shareable < length:
            return 0
        if not self.computes_prompt_of(leader, request) or self.rows.computed_len[leader.slot] < length:
            return 0
        source = self.rows.page_table[leader.slot, matched : matched + 1].copy()
        self._copies.append(Copy("page", source, pages[matched : matched + 1]))
        return length

    def computes_prompt_of(self, leader: Request, request: Request) -> bool:
        """Whether the leader has pages that hold, or will hold, the KV of the request's prompt."""
        same = leader.submit.input_ids == request.submit.input_ids
        return same and leader.has_pages and leader.space == request.under(self.cache.version)

    def forget_swapped(self, request: Request) -> None:
        """The request lets go of its KV on the host, and of the prefix in the tree before it."""
        assert request.swapped is not None and request.locked is not None
        self.swap.give_back(request.swapped.pages)
        self.cache.unlock(request.locked)
        request.swapped = request.locked = None

    def _open(self, request: Request, cached_tokens: int) -> None:
        slot = self.rows.open(request.submit, request.max_output, constrained=request.grammar is not None)
        self.rows.arrival[slot] = request.arrival
        self._requests[slot] = request
        request.slot, request.generation = slot, int(self.rows.generation[slot])
        request.cached_tokens = cached_tokens
        if request.submit.logprobs is not None or request.submit.embed:
            self.scored[slot] = request

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

    @property
    def has_copies(self) -> bool:
        return bool(self._copies)

    def take_copies(self) -> tuple[Copy, ...]:
        """Copies of pages since the last call, in order."""
        copies, self._copies = tuple(self._copies), []
        return copies

    def publish(self, slot: int) -> None:
        """Puts the row's computed whole pages into the tree, so that others can match them while it runs.

        Where the tree has such pages already, the row's table is rewritten to them and its own are freed once the steps
        that may read them have retired.
        """
        rows, request, size = self.rows, self.request(slot), self.cache.page_size
        count = rows.cacheable_len(slot) // size
        if (
            not self.cache.enabled
            or count <= request.tree_pages
            or request.space.weights != self.cache.version
        ):
            return
        assert request.locked is not None
        own = rows.page_table[slot, :count].copy()
        request.locked, kept = self.cache.publish(
            rows.known(slot)[: count * size], own, request.space, request.locked, request.priority
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
        if request.has_pages:
            self._leave(request)
        if rows.has(slot, ENDING):
            if request.swapped is not None:
                self.forget_swapped(request)
            self._requests[slot] = None
            self.scored.pop(slot, None)
            self.groups.leave(request.group)
            rows.close(slot)

    def _leave(self, request: Request) -> None:
        """Gives its pages back: the tree gets what can be shared, or the host what the request will go on with."""
        rows, slot, size = self.rows, request.slot, self.cache.page_size
        assert request.locked is not None
        begin, end = request.tree_pages, min(int(rows.computed_len[slot]), int(rows.known_len[slot]) - 1)
        own = rows.page_table[slot, begin : -(-end // size)].copy()
        if not rows.has(slot, ENDING) and self.swap.takes(own.size, begin * size, end):
            request.swapped = Swapped(begin, end, self.swap.take(own.size))
            self._copies.append(Copy("out", own, request.swapped.pages))
        else:
            self.publish(slot)
            self._hold(request)
            self.cache.unlock(request.locked)
            request.locked = None
        pages = int(rows.page_end[slot]) // size
        self.cache.give_back(rows.page_table[slot, request.tree_pages : pages])
        request.has_pages, request.tree_pages, rows.page_end[slot] = False, 0, 0
        rows.flags[slot] &= ~KEPT & 255
        self.running = self.running[self.running != slot]

    def _hold(self, request: Request) -> None:
        """Keeps the whole pages of a prompt that is computed for its group, where asked to."""
        size = self.cache.page_size
        group, pages = request.group, len(request.prompt) // size
        if group is None or not (request.submit.hold and 0 < pages <= request.tree_pages):
            return
        if request.space.weights == self.cache.version:
            self.groups.hold(group, request.prompt[: pages * size], request.space)

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
        assert not self.swap.used_pages, "host pages are still held"
        self.cache.check_idle()

    def _add_pages(self, slots: Slots, columns: I32, pages: I32) -> None:
        self.rows.set_pages(slots, columns, pages)
        self._update(slots, columns, pages)

    def _update(self, slots: Slots | int, columns: I32, pages: I32) -> None:
        update = np.empty((3, len(pages)), np.int32)
        update[0], update[1], update[2] = slots, columns, pages
        self._updates.append(update)
