"""Requests that share a prefix next to each other, the most wanted first."""

from hypothesis import given
from hypothesis import strategies as st

from gapless.radix_cache.namespace import Namespace
from gapless.runtime.policies.dfs_weight import DEPTH, SHARE, HeaviestBranch, depth_first

from .test_queues import naive_depth_first
from .waiting import Request

PROMPTS = st.lists(st.integers(0, 300), min_size=1, max_size=8).map(tuple)
FORKING = st.lists(st.integers(0, 1), min_size=1, max_size=8).map(tuple)
NAMESPACES = st.sampled_from([Namespace(), Namespace(extra_key="x"), Namespace(adapter="x")])


def arrivals(requests):
    return [request.arrival for request in requests]


def requests_of(*prompts, first=1):
    return [Request(arrival, tuple(prompt)) for arrival, prompt in enumerate(prompts, first)]


def drain(queue):
    order = []
    while (request := queue.first()) is not None:
        queue.remove(request, admitted=True)
        order.append(request.arrival)
    return order


@given(st.lists(st.tuples(PROMPTS | FORKING, NAMESPACES), min_size=1, max_size=30))
def test_the_order_is_that_of_the_naive_trie(prompts):
    requests = [Request(n, tokens, namespace=space) for n, (tokens, space) in enumerate(prompts, 1)]
    assert arrivals(depth_first(requests)) == arrivals(naive_depth_first(requests))


def test_the_heaviest_branch_is_first_at_each_fork():
    a, b, c = (1, 1), (1, 2), (2,)
    requests = requests_of((*c, 1), (*a, 1), (*b, 1), (*b, 2), (*c, 2))
    assert arrivals(depth_first(requests)) == [3, 4, 2, 1, 5]


def test_prompts_that_begin_each_other_form_a_path():
    requests = requests_of(*((0,) * length for length in range(256, 0, -1)))
    assert sorted(arrivals(depth_first(requests))) == list(range(1, 257))
    assert depth_first(requests)[-1].tokens == (0,)


def test_beyond_the_depth_that_is_compared_arrival_decides():
    same = (5,) * DEPTH
    requests = requests_of((*same, 1), (*same, 2), (*same, 1), (*same, 2))
    assert arrivals(depth_first(requests)) == [1, 2, 3, 4]
    shorter = [Request(request.arrival, request.tokens[1:]) for request in requests]
    assert arrivals(depth_first(shorter)) == [1, 3, 2, 4]


def test_namespaces_share_nothing():
    x, y = Namespace(extra_key="x"), Namespace(extra_key="y")
    requests = [Request(1, (1, 2), namespace=x), Request(2, (3,), namespace=y), Request(3, (1,), namespace=y)]
    requests.append(Request(4, (3,), namespace=y))
    assert arrivals(depth_first(requests)) == [2, 4, 1, 3]


def test_groups_that_come_interleaved_are_served_one_by_one():
    queue = HeaviestBranch()
    for request in requests_of(*((arrival % 4, arrival) for arrival in range(64))):
        queue.push(request)
    assert [arrival % 4 for arrival in drain(queue)] == [1] * 16 + [2] * 16 + [3] * 16 + [0] * 16


def test_a_branch_that_was_begun_is_finished():
    queue = HeaviestBranch()
    for request in requests_of((1, 1), (1, 2), (1, 3), (2, 1), (2, 2)):
        queue.push(request)
    assert drain(queue) == [1, 2, 3, 4, 5], "though the second branch is the heavier one after two"


def test_who_was_held_back_has_its_place_again():
    queue = HeaviestBranch()
    requests = requests_of((1, 1), (2, 1), (1, 2), (2, 2), (1, 3), (3, 3), (3, 4))
    for request in requests:
        queue.push(request)
    assert queue.first() is requests[0]
    queue.remove(requests[0], admitted=True)
    for request in (requests[2], requests[4]):
        assert queue.first() is request
        queue.remove(request, admitted=False)
    assert queue.first() is requests[1]
    for request in (requests[4], requests[2]):
        queue.push(request)
    assert drain(queue) == [3, 5, 2, 4, 6, 7]


def test_beyond_the_window_arrival_decides():
    queue = HeaviestBranch(window=4)
    requests = requests_of((1, 1), (2, 1), (3, 1), (4, 1), (9, 1), (9, 2), (9, 3), (9, 4))
    for request in requests:
        queue.push(request)
    assert queue.first() is requests[0]
    for request in requests[:4]:
        queue.remove(request, admitted=False)
    assert drain(queue) == [5, 6, 7, 8]


def test_the_order_is_made_for_a_share_of_new_requests_not_for_each(monkeypatch):
    made = []
    monkeypatch.setattr(
        "gapless.runtime.policies.dfs_weight.depth_first",
        lambda requests: made.append(len(requests)) or depth_first(requests),
    )
    queue = HeaviestBranch()
    requests = requests_of(*((arrival % 7, arrival) for arrival in range(1, 201)))
    for request in requests[:100]:
        queue.push(request)
    for _ in range(10):
        queue.first()
        queue.turn()
    assert made == [100]
    for request in requests[100:200]:
        queue.push(request)
        queue.first()
    assert made == [100, 125, 157, 197] and SHARE == 4
