"""Requests that share a prefix next to each other, the most wanted prefix first (SGLang's dfs-weight).

The waiting prompts form a trie. It is served depth first, at each fork the branch under which most requests wait, then
the one with the oldest request. SGLang weighs the nodes of the cached tree, anew in each step. Here the trie is made of
the prompts themselves, so that it also brings together those whose prefix has not been computed yet, and asks nothing
of the cache.

The trie holds a window: the requests whose arrival is less than WINDOW after that of the oldest one that waits; others
follow by arrival. So only WINDOW - 1 later requests can pass one that waits, however heavy their branch. (One that was
held back meets the window anew when it comes back.) The order stays when requests leave, so a branch that was begun is
finished, and is made anew only when others can join the window, after as many pushes and removals as a share of its
size: its cost is a constant for each of those.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Generic

from gapless.runtime.policies.base import W, Waiting
from gapless.runtime.policies.heap import LazyHeap

WINDOW = 256  # requests; as many as run at once by default
DEPTH = 4096  # tokens of a prompt that are compared: those that share more are neighbours, by arrival
SHARE = 4  # the window is looked at again when a fourth of its size has come or gone

# Below a node of the trie: minus the number of requests, the arrival of the oldest, and they in order. Sorts as served.
Branch = tuple[int, int, list[W]]


class HeaviestBranch(Generic[W]):
    def __init__(self, window: int = WINDOW, share: int = SHARE) -> None:
        self._window, self._share = window, share
        self._placed: LazyHeap[W] = LazyHeap()  # those in the window, by place
        self._later: LazyHeap[W] = LazyHeap()  # the others, by arrival
        self._places: dict[W, int] = {}  # of all in the last order that were not admitted: they may come back
        self._events = 0  # pushes and removals since the last look

    def push(self, request: W) -> None:
        self._events += 1
        place = self._places.get(request)
        if place is None:
            self._later.push(request, (request.arrival,))
        else:
            self._placed.push(request, (place,))

    def remove(self, request: W, *, admitted: bool) -> None:
        self._events += 1
        if request in self._placed:
            self._placed.remove(request)
            if admitted:
                del self._places[request]
        else:
            self._later.remove(request)

    def first(self) -> W | None:
        if self._later and self._events * self._share >= len(self._placed):
            self._renew()
        return (self._placed or self._later).first()

    def turn(self) -> None:
        pass

    def _renew(self) -> None:
        """Lets those join that have come into the window; if there are any, all places are given anew."""
        self._events = 0
        joining = self._later.first()
        assert joining is not None
        end = min([joining.arrival, *(request.arrival for request in self._placed)]) + self._window
        if joining.arrival >= end:
            return
        window = [request for request in self._placed if request.arrival < end]
        # An older one came back: the window begins with it, so it may end before some that were in it.
        for request in self._placed:
            if request.arrival >= end:
                self._later.push(request, (request.arrival,))
        while joining is not None and joining.arrival < end:
            self._later.remove(joining)
            window.append(joining)
            joining = self._later.first()
        self._placed = LazyHeap()
        self._places = {request: place for place, request in enumerate(depth_first(window))}
        for request, place in self._places.items():
            self._placed.push(request, (place,))

    def __len__(self) -> int:
        return len(self._placed) + len(self._later)


def depth_first(requests: Sequence[W]) -> list[W]:
    """The requests, one at least, in the order of their prompts' trie. Holds DEPTH tokens of each meanwhile.

    Sorted by their bytes, all that share a prefix are neighbours. So one pass builds the trie bottom up: `forks` is the
    path from the root to the fork at hand, with the branches done so far.
    """
    line = sorted(requests, key=lambda request: (request.namespace, request.prompt[:DEPTH].tobytes()))
    shared = [_common_tokens(a, b) for a, b in pairwise(line)]
    forks: list[tuple[int, list[Branch[W]]]] = []
    for request, depth in zip(line, [*shared, -1], strict=True):  # depth: of the fork with the next one
        branch: Branch[W] = (-1, request.arrival, [request])
        while forks and forks[-1][0] > depth:
            branch = _joined([*forks.pop()[1], branch])
        if not forks or forks[-1][0] < depth:
            forks.append((depth, []))
        forks[-1][1].append(branch)
    return _joined(forks[0][1])[2]


def _joined(branches: list[Branch[W]]) -> Branch[W]:
    branches.sort()  # by weight and age: no two are of the same age, so requests are not compared
    requests = [request for branch in branches for request in branch[2]]
    return -len(requests), min(branch[1] for branch in branches), requests


def _common_tokens(a: Waiting, b: Waiting) -> int:
    if a.namespace != b.namespace:
        return 0
    least = min(len(a.prompt), len(b.prompt), DEPTH)
    differ = a.prompt[:least] != b.prompt[:least]
    return int(differ.argmax()) if differ.any() else least
