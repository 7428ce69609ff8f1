"""What holds for the queues of all names."""

import dataclasses
import gc
import random
import weakref

import pytest

from gapless.runtime.core.config import ServerConfig
from gapless.runtime.policies.dfs_weight import WINDOW
from gapless.runtime.policies.registry import QUEUES, make_queue

from .waiting import Cache, Request


def drain(queue):
    order = []
    while (request := queue.first()) is not None:
        queue.remove(request, admitted=True)
        order.append(request.arrival)
    return order


def some_requests(count=300):
    rng = random.Random(1)
    return [
        Request(n + 1, (rng.randrange(9), rng.randrange(9)), rng.randrange(50), rng.randrange(5))
        for n in range(count)
    ]


def filled(name, seed=0, requests=None):
    cache = Cache()
    queue = make_queue(name, cache, seed)
    for request in some_requests() if requests is None else requests:
        cache.cached[request] = request.max_output
        queue.push(request)
    return queue


def test_the_names_are_those_of_the_option():
    choices = {field.name: field.metadata["choices"] for field in dataclasses.fields(ServerConfig)}
    assert set(QUEUES) == set(choices["schedule_policy"])


@pytest.mark.parametrize("name", QUEUES)
def test_the_same_requests_come_in_the_same_order(name):
    order = drain(filled(name))
    assert order == drain(filled(name)) and sorted(order) == list(range(1, 301))
    assert (order == sorted(order)) == (name == "fcfs")


@pytest.mark.parametrize("name", ["fcfs", "lof", "priority", "random"])
def test_orders_by_a_number_do_not_depend_on_the_order_of_pushing(name):
    assert drain(filled(name)) == drain(filled(name, requests=some_requests()[::-1]))


def test_only_random_depends_on_the_seed():
    assert {name for name in QUEUES if drain(filled(name, 1)) != drain(filled(name, -2))} == {"random"}


@pytest.mark.parametrize("name", QUEUES)
def test_misuse_raises(name):
    queue, request = make_queue(name, Cache(), 0), Request(1)
    assert queue.first() is None
    with pytest.raises(AssertionError):
        queue.remove(request, admitted=True)
    queue.push(request)
    queue.remove(request, admitted=False)
    with pytest.raises(AssertionError):
        queue.remove(request, admitted=False)
    queue.push(request)
    with pytest.raises(AssertionError):
        queue.push(request)
    assert queue.first() is request


@pytest.mark.parametrize("aborts", [False, True])
@pytest.mark.parametrize("name", QUEUES)
def test_requests_are_let_go(name, aborts):
    class Nothing:
        changes = 0

        def cached_tokens(self, request):
            return 0

    queue, requests = make_queue(name, Nothing(), 0), some_requests(2 * WINDOW + 100)
    alive = weakref.WeakSet(requests)
    for request in requests:
        queue.push(request)
    random.Random(0).shuffle(requests)
    while requests:
        abort = aborts and len(requests) % 3 > 0
        request = requests[-1] if abort else queue.first()
        requests.remove(request)
        queue.remove(request, admitted=not abort)
    del request
    gc.collect()
    # dfs-weight keeps the places of one window, for those that come back.
    assert len(alive) <= (WINDOW if aborts and name == "dfs-weight" else 0)
