"""Longest cached prefix first (SGLang's lpm, Zheng et al. 2024), with ageing: it keeps shared prefixes in the cache
without starving requests that share none.

A request's rank is the number of its cached tokens, plus AGEING for every request admitted since it came. All that wait
gain the same, so their order only changes when a match does:

    key = AGEING * (admissions before it came) - cached tokens,  the least first, ties by arrival.

The bound: where no prompt has more than M tokens cached, only requests that come before ceil(M / AGEING) others have
been admitted can pass an older one. So of a stream that brings one request an admission, at most that many pass it; of
bursts, no more than come meanwhile. As the server holds at most --max-queued-requests at once, a request is passed
by at most M / AGEING plus so many, whatever comes. A limit on how many of one burst may pass (ageing by arrivals) was
tried: it undoes what the policy is for, since in a burst the requests of one prefix lie far apart.

A match costs 10 to 60 us, so few are made in a step: the first PUSH_MATCHES that come, the candidate (TRIES at most, as
its rank may fall), and those whose last answer is the oldest: TURN_MATCHES, and ADMISSION_MATCHES for each admission.
The others keep their last answer.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Generic

from gapless.runtime.policies.base import Prefixes, W
from gapless.runtime.policies.heap import Key, LazyHeap

AGEING = (
    2  # tokens an admission; at 16, a tree's levels (100 tokens apart) were served by age and not by match
)
TRIES = 8
TURN_MATCHES = 8
# An admission uses up one request that is known to be warm; at a hit in four this finds the next one.
ADMISSION_MATCHES = 4
PUSH_MATCHES = (
    128  # SGLang matches as many in every step; later ones of a larger burst count as cold until looked at
)


class LongestPrefix(Generic[W]):
    def __init__(self, prefixes: Prefixes[W]) -> None:
        self._prefixes = prefixes
        self._heap: LazyHeap[W] = LazyHeap()
        # The last answer: cached tokens, and the cache's `changes` at that time. Ordered by the latter; those that were
        # not asked for yet come first, with (0, -1).
        self._answers: OrderedDict[W, tuple[int, int]] = OrderedDict()
        self._admissions = 0
        self._pushes_in_turn = 0
        self._admissions_in_turn = 0

    def push(self, request: W) -> None:
        if request.stamp < 0:
            request.stamp = self._admissions
        self._heap.push(request, self._key(request, 0))
        self._answers[request] = (0, -1)
        self._answers.move_to_end(request, last=False)
        self._pushes_in_turn += 1
        if self._pushes_in_turn <= PUSH_MATCHES:
            self._match(request)

    def remove(self, request: W, *, admitted: bool) -> None:
        self._heap.remove(request)
        del self._answers[request]
        self._admissions += admitted
        self._admissions_in_turn += admitted

    def first(self) -> W | None:
        for _ in range(TRIES):
            request = self._heap.first()
            if request is None or self._answers[request][1] == self._prefixes.changes:
                return request
            self._match(request)
        return self._heap.first()

    def turn(self) -> None:
        matches = TURN_MATCHES + ADMISSION_MATCHES * self._admissions_in_turn
        self._pushes_in_turn = self._admissions_in_turn = 0
        for _ in range(min(matches, len(self._answers))):
            request = next(iter(self._answers))
            if self._answers[request][1] == self._prefixes.changes:
                break  # so all others are up to date as well
            self._match(request)

    def _match(self, request: W) -> None:
        before, cached = self._answers[request][0], self._prefixes.cached_tokens(request)
        self._answers[request] = (cached, self._prefixes.changes)
        self._answers.move_to_end(request)
        if cached != before:
            self._heap.remove(request)
            self._heap.push(request, self._key(request, cached))

    @staticmethod
    def _key(request: W, cached: int) -> Key:
        return (AGEING * request.stamp - cached, request.arrival)

    def __len__(self) -> int:
        return len(self._heap)
