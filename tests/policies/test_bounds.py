"""What a policy promises however many requests there are: bounded work in a step, and nobody starves."""

import random
from collections import Counter

import pytest

from gapless.runtime.policies import heap
from gapless.runtime.policies.dfs_weight import SHARE, WINDOW, HeaviestBranch
from gapless.runtime.policies.lpm import (
    ADMISSION_MATCHES,
    AGEING,
    PUSH_MATCHES,
    TRIES,
    TURN_MATCHES,
    LongestPrefix,
)
from gapless.runtime.policies.registry import QUEUES, make_queue

from .waiting import Cache, Request

MANY = 5000
ADMITTED = 4  # in a step
STEPS = 150


class CountingHeapq:
    """The heap's functions; `touched` counts entries: one a push or pop, all of them a rebuild."""

    def __init__(self, heapq):
        self.heapq, self.touched, self.rebuilt = heapq, 0, 0

    def heappush(self, entries, entry):
        self.touched += 1
        self.heapq.heappush(entries, entry)

    def heappop(self, entries):
        self.touched += 1
        return self.heapq.heappop(entries)

    def heapify(self, entries):
        self.rebuilt += len(entries)
        self.heapq.heapify(entries)


@pytest.fixture
def operations(monkeypatch):
    counting = CountingHeapq(heap.heapq)
    monkeypatch.setattr(heap, "heapq", counting)
    return counting


def many_waiting(name):
    cache, rng = Cache(), random.Random(0)
    queue = make_queue(name, cache, 0)
    for arrival in range(1, MANY + 1):
        request = Request(arrival, (rng.randrange(20), arrival), rng.randrange(9), rng.randrange(9))
        cache.cached[request] = rng.randrange(512)
        queue.push(request)
    return cache, queue


@pytest.mark.parametrize("name", QUEUES)
def test_a_burst_of_5000_asks_the_cache_for_few(name):
    cache, queue = many_waiting(name)
    assert len(queue) == MANY
    assert cache.asked == (PUSH_MATCHES if name == "lpm" else 0)


@pytest.mark.parametrize("name", QUEUES)
def test_5000_waiting_do_not_slow_a_step(name, operations):
    cache, queue = many_waiting(name)
    rng = random.Random(1)
    per_step = TURN_MATCHES + ADMITTED * ADMISSION_MATCHES
    rebuilt_before = operations.rebuilt
    touched = []
    for _ in range(STEPS):
        cache.changes += 1
        for request in list(cache.answers):
            cache.cached[request] = rng.randrange(512)
        asked, before = cache.asked, operations.touched
        queue.turn()
        assert cache.asked - asked <= (per_step if name == "lpm" else 0)
        for _ in range(ADMITTED):
            asked = cache.asked
            request = queue.first()
            assert cache.asked - asked <= (TRIES if name == "lpm" else 0)
            queue.remove(request, admitted=True)
        touched.append(operations.touched - before)
    # An entry is pushed for each match, and each that was pushed is popped at most once.
    matches = per_step + ADMITTED * TRIES
    if name == "dfs-weight":
        window = 2 * WINDOW  # to fill it takes a pop and a push of each
        assert max(touched) <= window + 2 * ADMITTED
        assert sum(count > WINDOW for count in touched) <= 1 + STEPS * ADMITTED * (SHARE + 1) // WINDOW
    elif name == "lpm":
        assert sum(touched) <= STEPS * 2 * matches
        assert sorted(touched)[STEPS // 2] <= 2 * matches
    else:
        assert max(touched) <= ADMITTED
    # A rebuild of n follows n removals, and a match may be one.
    assert operations.rebuilt - rebuilt_before <= STEPS * (ADMITTED + matches)


@pytest.mark.parametrize("name", QUEUES)
def test_many_steps_in_which_nothing_fits_cost_nothing(name, operations):
    cache, queue = many_waiting(name)
    queue.first()
    for _ in range(-(-MANY // TURN_MATCHES)):
        queue.turn()
    queue.first()
    asked, touched = cache.asked, operations.touched
    for _ in range(100):
        queue.turn()
        queue.first()
    assert (cache.asked, operations.touched) == (asked, touched)


@pytest.mark.parametrize("name", QUEUES)
def test_5000_that_are_taken_out_at_random_cost_a_constant_each(name, operations):
    queue = make_queue(name, Cache(), 0)
    requests = [Request(arrival) for arrival in range(1, MANY + 1)]
    for request in requests:
        queue.push(request)
    random.Random(0).shuffle(requests)
    operations.touched = operations.rebuilt = 0
    for request in requests:
        queue.remove(request, admitted=False)
    assert operations.rebuilt <= MANY and operations.touched == 0
    assert len(queue) == 0 and queue.first() is None


def passed_by(queue, cold, arrivals, add):
    """How many are admitted before `cold`, one at a time, where `add(arrival)` makes the next request."""
    passed = 0
    while (request := queue.first()) is not cold:
        queue.remove(request, admitted=True)
        passed += 1
        assert passed < 100_000
        queue.turn()
        add(next(arrivals))
    return passed


@pytest.mark.parametrize("cached", [1, 16, 100, 512, 4096])
def test_lpm_admits_a_cold_request_within_its_bound_of_warm_ones(cached):
    cache = Cache()
    queue = LongestPrefix(cache)
    cold = Request(1)
    queue.push(cold)
    arrivals = iter(range(2, 1_000_000))

    def add(arrival):
        warm = Request(arrival)
        cache.change(warm, cached)
        queue.push(warm)

    add(next(arrivals))
    assert passed_by(queue, cold, arrivals, add) == -(-cached // AGEING)


def test_lpm_lets_no_more_of_a_flood_pass_than_came_before_the_bound():
    cached, flood = 512, 20
    cache = Cache()
    queue = LongestPrefix(cache)
    cold = Request(1)
    queue.push(cold)
    arrivals = iter(range(2, 10_000_000))

    def add(arrival):
        for number in [arrival, *(next(arrivals) for _ in range(flood - 1))]:
            warm = Request(number)
            cache.change(warm, cached)
            queue.push(warm)

    add(next(arrivals))
    admissions = cached // AGEING
    assert passed_by(queue, cold, arrivals, add) == admissions * flood


def test_lpm_bounds_who_passes_whom_in_a_mixed_stream():
    """At full load no request is passed by more later ones than the bound plus the queue's length."""
    cached, limit, rng = 256, 64, random.Random(3)
    cache = Cache()
    queue = LongestPrefix(cache)
    waiting, passed = {}, Counter()
    for arrival in range(1, 4000):
        request = Request(arrival)
        cache.change(request, cached if rng.random() < 0.9 else 0)
        queue.push(request)
        waiting[request] = None
        queue.turn()
        while len(waiting) >= limit:
            first = queue.first()
            queue.remove(first, admitted=True)
            del waiting[first]
            for other in waiting:
                if other.arrival > first.arrival:
                    break
                passed[other] += 1
    assert 0 < max(passed.values()) <= cached // AGEING + limit


def test_dfs_weight_lets_a_window_of_later_requests_pass_and_no_more():
    queue = HeaviestBranch()
    lone = Request(1, (1, 1))
    queue.push(lone)
    arrivals = iter(range(2, 1_000_000))

    def add(arrival):
        for number in (arrival, next(arrivals)):
            queue.push(Request(number, (2, number)))

    for _ in range(200):
        add(next(arrivals))
    assert passed_by(queue, lone, arrivals, add) == WINDOW - 1


def test_dfs_weight_starves_nobody_in_a_flood_of_uneven_branches():
    rng = random.Random(5)
    queue = HeaviestBranch()
    waiting, passed = {}, Counter()
    for arrival in range(1, 6000):
        branch = int(rng.paretovariate(0.7))
        request = Request(arrival, (branch, rng.randrange(3), arrival))
        queue.push(request)
        waiting[request] = None
        if arrival % 2 and arrival > 400:
            first = queue.first()
            queue.remove(first, admitted=True)
            del waiting[first]
            for other in waiting:
                if other.arrival > first.arrival:
                    break
                passed[other] += 1
    assert WINDOW / 4 < max(passed.values()) < WINDOW
