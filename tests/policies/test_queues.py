"""Each queue against a naive sort of all that wait."""

from itertools import count

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from gapless.radix_cache.namespace import Namespace
from gapless.runtime.policies import lpm
from gapless.runtime.policies.dfs_weight import HeaviestBranch
from gapless.runtime.policies.registry import make_queue

from .waiting import Cache, Request

SEED = 7
NAMESPACES = [Namespace(), Namespace(extra_key="x")]
REQUESTS = {
    "tokens": st.lists(st.integers(0, 1), min_size=1, max_size=6).map(tuple),
    "max_output": st.integers(1, 3),
    "priority": st.integers(-1, 1),
    "namespace": st.sampled_from(NAMESPACES),
}


class QueueMachine(RuleBasedStateMachine):
    """Requests come, are tried, are taken out from anywhere and come back. `key` is the order to expect."""

    name = ""

    def __init__(self):
        super().__init__()
        self.cache = Cache()
        self.queue = self.make()
        self.arrivals = count(1)
        self.waiting, self.held = [], []
        self.admissions = 0

    def make(self):
        return make_queue(self.name, self.cache, SEED)

    def key(self, request):
        raise NotImplementedError

    def expected(self):
        return min(self.waiting, key=self.key, default=None)

    @rule(fields=st.lists(st.fixed_dictionaries(REQUESTS), min_size=1, max_size=4), cached=st.integers(0, 64))
    def arrive(self, fields, cached):
        for each in fields:
            request = Request(next(self.arrivals), **each)
            self.cache.cached[request] = cached
            self.came(request)
            self.push(request)

    def came(self, request):
        pass

    def push(self, request):
        self.queue.push(request)
        self.waiting.append(request)

    def remove(self, request, admitted):
        self.queue.remove(request, admitted=admitted)
        self.waiting.remove(request)
        self.admissions += admitted

    @precondition(lambda self: self.waiting)
    @rule(hold=st.booleans())
    def try_first(self, hold):
        request = self.queue.first()
        self.remove(request, admitted=not hold)
        if hold:
            self.held.append(request)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data(), fate=st.sampled_from(["admitted", "aborted", "held"]))
    def take_any(self, data, fate):
        request = data.draw(st.sampled_from(self.waiting))
        self.remove(request, admitted=fate == "admitted")
        if fate == "held":
            self.held.append(request)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def come_back(self, data):
        request = data.draw(st.sampled_from(self.held))
        self.held.remove(request)
        self.push(request)

    @rule()
    def turn(self):
        self.queue.turn()

    @invariant()
    def the_first_is_right(self):
        assert len(self.queue) == len(self.waiting)
        first = self.queue.first()
        assert first is self.expected()


class Fcfs(QueueMachine):
    name = "fcfs"

    def key(self, request):
        return request.arrival


class Lof(QueueMachine):
    name = "lof"

    def key(self, request):
        return -request.max_output, request.arrival


class Priority(QueueMachine):
    name = "priority"

    def key(self, request):
        return -request.priority, request.arrival


def splitmix(value):
    value = (value + 0x9E3779B97F4A7C15) % 2**64
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    value = (value ^ value >> 27) * 0x94D049BB133111EB % 2**64
    return value ^ value >> 31


class Random(QueueMachine):
    name = "random"

    def key(self, request):
        return splitmix(splitmix(SEED) ^ request.arrival)


class Lpm(QueueMachine):
    """By the last answers, which are the cache's own for the first (unless it took too many tries) and, after enough
    turns, for all."""

    name = "lpm"

    def __init__(self):
        super().__init__()
        self.stamps = {}

    def came(self, request):
        self.stamps[request] = self.admissions

    def key(self, request):
        cached = self.cache.answers.get(request, 0)
        return lpm.AGEING * self.stamps[request] - cached, request.arrival

    @precondition(lambda self: self.waiting)
    @rule(data=st.data(), tokens=st.integers(0, 64))
    def the_cache_changes(self, data, tokens):
        for request in data.draw(st.sets(st.sampled_from(self.waiting), min_size=1)):
            self.cache.change(request, tokens)

    @precondition(lambda self: self.waiting)
    @rule()
    def turns_bring_all_up_to_date(self):
        for _ in range(-(-len(self.waiting) // lpm.TURN_MATCHES)):
            self.queue.turn()
        assert all(self.cache.answers[request] == self.cache.cached[request] for request in self.waiting)

    @invariant()
    def the_first_is_up_to_date(self):
        before = self.cache.asked
        first = self.queue.first()
        tries = self.cache.asked - before
        assert tries <= lpm.TRIES
        if first is not None and tries < lpm.TRIES:
            assert self.cache.answers[first] == self.cache.cached[first]


def naive_depth_first(requests, depth=0):
    if len(requests) < 2:
        return requests
    branches = {}
    for request in requests:
        ended = depth == len(request.tokens)
        name = request if ended else (request.namespace, request.tokens[depth])
        branches.setdefault(name, []).append(request)
    ordered = sorted(branches.values(), key=lambda branch: (-len(branch), min(r.arrival for r in branch)))
    return [request for branch in ordered for request in naive_depth_first(branch, depth + 1)]


class DfsWeight(QueueMachine):
    """With a window of 6 that is looked at after every change, so that the naive model can say what it holds."""

    def __init__(self):
        super().__init__()
        self.order = []

    def make(self):
        return HeaviestBranch(window=6, share=10**9)

    def remove(self, request, admitted):
        super().remove(request, admitted)
        if admitted and request in self.order:
            self.order.remove(request)

    def expected(self):
        if not self.waiting:
            return None
        end = min(request.arrival for request in self.waiting) + 6
        window = [request for request in self.waiting if request.arrival < end]
        if any(request not in self.order for request in window):
            self.order = naive_depth_first(window)
        placed = [request for request in self.order if request in self.waiting]
        return placed[0] if placed else min(self.waiting, key=lambda request: request.arrival)


MACHINES = [Fcfs, Lof, Priority, Random, Lpm, DfsWeight]


@pytest.mark.parametrize("machine", MACHINES)
def test_the_queue_agrees_with_a_sort(machine):
    run_state_machine_as_test(machine, settings=settings(max_examples=40, stateful_step_count=30))
