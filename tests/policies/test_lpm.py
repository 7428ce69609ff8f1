"""The longest cached prefix first: what is asked of the cache, and when."""

from gapless.runtime.policies.lpm import (
    ADMISSION_MATCHES,
    AGEING,
    PUSH_MATCHES,
    TRIES,
    TURN_MATCHES,
    LongestPrefix,
)

from .waiting import Cache, Request


def queue_of(*cached):
    """A queue with a request for each number, which is what it has cached."""
    cache = Cache()
    queue = LongestPrefix(cache)
    requests = [Request(arrival) for arrival in range(1, len(cached) + 1)]
    for request, tokens in zip(requests, cached, strict=True):
        cache.cached[request] = tokens
        queue.push(request)
    return cache, queue, requests


def test_the_longest_is_first_and_ties_go_by_arrival():
    _, queue, (a, b, c, d) = queue_of(0, 32, 64, 64)
    order = []
    while (request := queue.first()) is not None:
        queue.remove(request, admitted=True)
        order.append(request)
    assert order == [c, d, b, a]


def test_a_candidate_whose_prefix_went_steps_back():
    cache, queue, (a, b, _) = queue_of(64, 48, 32)
    assert queue.first() is a
    cache.change(a, 16)
    assert queue.first() is b


def test_a_candidate_is_asked_for_once_a_change():
    cache, queue, _ = queue_of(64, 48)
    cache.changes += 1
    before = cache.asked
    for _ in range(5):
        queue.first()
    assert cache.asked == before + 1


def test_tries_are_bounded_and_some_request_comes_of_them():
    cache, queue, requests = queue_of(*[64] * (3 * TRIES))
    for request in requests:
        cache.change(request, 0)
    before = cache.asked
    assert queue.first() is requests[TRIES]
    assert cache.asked == before + TRIES


def test_a_prefix_that_appears_is_found_by_turns():
    cache, queue, requests = queue_of(*[0] * (3 * TURN_MATCHES))
    cache.change(requests[-1], 64)
    for _ in range(3):
        assert queue.first() is requests[0]
        queue.turn()
    assert queue.first() is requests[-1]


def test_a_turn_with_nothing_new_asks_nothing():
    cache, queue, _ = queue_of(*[0] * 20)
    before = cache.asked
    queue.turn()
    assert cache.asked == before
    cache.changes += 1
    for _ in range(20):
        queue.turn()
    assert cache.asked == before + 20, "each once"


def test_admissions_pay_for_more_matches():
    cache, queue, requests = queue_of(*[0] * 100)
    for request in requests[:3]:
        queue.remove(request, admitted=True)
    for request in requests[3:6]:
        queue.remove(request, admitted=False)
    cache.changes += 1
    before = cache.asked
    queue.turn()
    assert cache.asked == before + TURN_MATCHES + 3 * ADMISSION_MATCHES
    queue.turn()
    assert cache.asked == before + 2 * TURN_MATCHES + 3 * ADMISSION_MATCHES


def test_a_burst_is_matched_within_a_few_turns():
    burst = 300
    cache, queue, _ = queue_of(*[0] * (burst - 1), 64)
    assert cache.asked == PUSH_MATCHES
    late = [request for request in cache.cached if request not in cache.answers]
    assert len(late) == burst - PUSH_MATCHES and late[-1].arrival == burst
    for _ in range(-(-len(late) // TURN_MATCHES)):
        cache.changes += 1  # those that were not asked for yet come before any that is to be asked again
        queue.turn()
    assert set(late) <= set(cache.answers)
    assert queue.first() is late[-1]


def test_only_admissions_age_and_who_comes_back_has_its_age():
    cache, queue, (old, *others) = queue_of(*[0] * 6)
    queue.remove(old, admitted=False)
    queue.remove(others[0], admitted=False)
    for request in others[1:4]:
        queue.remove(request, admitted=True)
    young = Request(7)
    cache.cached[young] = 3 * AGEING - 1
    queue.push(young)
    assert queue.first() is others[4]
    queue.push(old)
    assert queue.first() is old, "older than three admissions, by arrival before the rest"
    cache.change(young, 3 * AGEING)
    queue.remove(young, admitted=False)
    queue.push(young)
    assert queue.first() is old
    cache.change(young, 3 * AGEING + 1)
    queue.remove(young, admitted=False)
    queue.push(young)
    assert queue.first() is young
