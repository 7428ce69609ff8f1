"""Who joins the running requests: preempted ones first, then waiting ones in the order of the policy."""

from __future__ import annotations

from collections.abc import Iterator

from gapless.runtime.core.config import ServerConfig
from gapless.runtime.core.plan import SlotSetup
from gapless.runtime.policies.base import Queue
from gapless.runtime.policies.registry import make_queue
from gapless.runtime.scheduler import sharing
from gapless.runtime.scheduler.batch import Batch
from gapless.runtime.scheduler.preemption import Preemption
from gapless.runtime.scheduler.request import Request
from gapless.runtime.scheduler.reserve import Reserve
from gapless.runtime.scheduler.rows import ADJUSTED, ENDING, PREEMPTED
from gapless.runtime.scheduler.sharing import ALL, Sharing

MOST_HELD = 32  # requests that are looked at and held back in one step
RETRY = 16  # steps after which it is tried again whether one fits, although no page has become free


class Admission:
    """Implements `policies.base.Prefixes` for its queue."""

    def __init__(self, config: ServerConfig, batch: Batch, reserve: Reserve) -> None:
        self.batch = batch
        self.waiting: dict[int, Request] = {}  # by uid: those in the queue and those held back
        self.started: list[Request] = []  # got a slot since the last look; the detokenizer must hear of them
        self.setups: list[SlotSetup] = []  # for the next plan
        self._by_priority = config.schedule_policy == "priority"
        self.preemption = Preemption(batch, reserve, by_priority=self._by_priority)
        self._reserve = reserve
        self._queue: Queue[Request] = make_queue(config.schedule_policy, self, config.random_seed)
        self._sharing = Sharing(config.page_size)
        # How things were when the next one did not fit: pages available, changes of the cache.
        self._blocked: tuple[int, int] | None = None
        self._retry_in = 0

    @property
    def changes(self) -> int:
        return self.batch.cache.changes

    def cached_tokens(self, request: Request) -> int:
        cache = self.batch.cache
        shareable = request.prompt[: request.shareable]
        return cache.match(shareable, request.under(cache.version)).length * cache.page_size

    def add(self, request: Request) -> None:
        self.waiting[request.submit.uid] = request
        self._push(request)

    def withdraw(self, request: Request) -> None:
        """A request that waits for the first time goes away."""
        del self.waiting[request.submit.uid]
        if request.held_on is None:
            self._queue.remove(request, admitted=False)
        self._sharing.drop(request)
        self._release(self._sharing.ended(request))

    def computed(self, slot: int) -> None:
        """A chunk of the slot's prompt has retired, and its whole pages are in the tree."""
        rows, request = self.batch.rows, self.batch.request(slot)
        if rows.computed_len[slot] >= rows.target_len[slot]:
            self._release(self._sharing.ended(request))
        else:
            self._release(self._sharing.advanced(request, request.tree_pages * rows.page_size))

    def ended(self, request: Request) -> None:
        """A request that has a slot ends."""
        self.preemption.forget(request)
        self._release(self._sharing.ended(request))

    def relieve(self) -> None:
        """Running rows lack pages."""
        self._release_from(self.preemption.relieve())

    def admit(self) -> Iterator[Request]:
        """Starts requests, one each time it is asked, as long as slots and pages last."""
        if not (self.waiting or self.preemption.preempted):
            return
        rows, batch = self.batch.rows, self.batch
        self.preemption.settle()
        if self._is_blocked():
            return
        if self.waiting and rows.free_slots:
            self._queue.turn()
        growth: int | None = None  # pages that the running rows may still take
        held = 0
        while held < MOST_HELD and (request := self._next()) is not None:
            if self._waits_for_prefix(request):
                held += 1
                continue
            if growth is None or self._by_priority:
                growth = self._reserve.growth(self.preemption.firm(request), rows)
            # The first of all fits alone, whatever it generates: its max_output is clamped to the pool.
            reserve = self._reserve.pages_for(request, growth, rows) if batch.running.size else 0
            own = self._reserve.own_growth(request, rows)
            if missing := self._start(request, reserve):
                self._blocked, self._retry_in = (batch.cache.available, batch.cache.changes), RETRY
                self._release_from(self.preemption.make_room(request, missing))
                return
            growth += own
            yield request

    def _next(self) -> Request | None:
        """Whom to try now."""
        first = self._queue.first() if self.batch.rows.free_slots else None
        return self.preemption.before(first)

    def _waits_for_prefix(self, request: Request) -> bool:
        """Holds a request back where another one computes a prefix that it can share."""
        if request.slot or not self.batch.cache.enabled:
            return False
        if (found := self._whom_to_wait_for(request)) is None:
            return False
        self._queue.remove(request, admitted=False)
        self._sharing.hold(request, *found)
        return True

    def _whom_to_wait_for(self, request: Request) -> tuple[Request, int] | None:
        """The request that computes it, and how many tokens must be there."""
        leader, rows = request.leader, self.batch.rows
        if leader is not None and request.shareable == len(request.prompt) - 1:
            if leader.submit.uid in self.waiting:
                return leader, ALL
            stays = leader.has_pages and not rows.has(leader.slot, ENDING | PREEMPTED)
            if (
                stays
                and rows.computed_len[leader.slot] < rows.prompt_len[leader.slot]
                and self.batch.computes_prompt_of(leader, request)
            ):
                return leader, ALL
        namespace = request.under(self.batch.cache.version)
        tokens, other = self._sharing.coming(request.prompt[: request.shareable], namespace)
        if other is None or tokens < sharing.LEAST_SHARED:
            return None
        return (other, tokens) if tokens - self.cached_tokens(request) >= sharing.LEAST_SHARED else None

    def _release_from(self, preempted: list[Request]) -> None:
        for request in preempted:
            self._release(self._sharing.ended(request))

    def _release(self, requests: list[Request]) -> None:
        for request in requests:
            self._push(request)

    def _push(self, request: Request) -> None:
        self._blocked = None  # it may come first
        self._queue.push(request)

    def _is_blocked(self) -> bool:
        """Whether the next one did not fit a short while ago and nothing has changed, so that matching is in vain."""
        if self._blocked is None or not self.batch.running.size:
            return False
        available, changes = self._blocked
        self._retry_in -= 1
        cache, soon = self.batch.cache, self._retry_in > 0
        return soon and cache.available <= available and cache.changes == changes

    def _start(self, request: Request, reserve_pages: int) -> int:
        """Returns 0, or how many pages are missing."""
        batch, rows, resumed = self.batch, self.batch.rows, request.slot != 0
        if missing := batch.start(request, reserve_pages):
            return missing
        self._blocked = None
        uncached = int(rows.known_len[request.slot] - rows.launched_len[request.slot])
        if batch.cache.enabled and uncached >= sharing.LEAST_SHARED:
            self._sharing.begin(request, rows.known(request.slot))
        if resumed:
            self.preemption.resumed(request)
            return 0
        del self.waiting[request.submit.uid]
        self._queue.remove(request, admitted=True)
        self.started.append(request)
        if rows.has(request.slot, ADJUSTED):
            submit = request.submit
            self.setups.append(SlotSetup(request.slot, request.prompt, submit.stop_ids, submit.params))
        return 0
