"""The order of eviction, for each strategy."""

import gc
import sys

import numpy as np
import pytest

from gapless.radix_cache.eviction import STRATEGIES
from gapless.radix_cache.tree import RadixTree
from gapless.runtime.core.config import ServerConfig

SPACE = ""


def insert(tree, tokens, page, priority=0):
    """Two pages, `page` and the next."""
    tree.insert(np.array(tokens, np.int32), np.array([page, page + 1], np.int32), SPACE, priority)


def leaves(eviction, count=5, priorities=(0,) * 5):
    """A tree of `count` leaves 0, 1, ... of two pages, made in this order; leaf n has pages 10 n and 10 n + 1."""
    tree = RadixTree(1, eviction)
    for leaf in range(count):
        insert(tree, [leaf, 100], 10 * leaf, priorities[leaf])
    return tree


def use(tree, leaf, priority=0):
    tree.unlock(tree.lock(tree.match(np.array([leaf, 100], np.int32), SPACE), priority))


def order(tree):
    """The leaves in the order in which they are evicted."""
    found = []
    while tree.evictable:
        first, second = tree.evict(1).tolist()
        assert second == first + 1
        found.append(first // 10)
    return found


def test_the_strategies_are_those_of_the_option():
    assert set(STRATEGIES) == set(
        ServerConfig.__dataclass_fields__["radix_eviction_policy"].metadata["choices"]
    )


def test_lru_evicts_what_was_released_first():
    tree = leaves("lru")
    for leaf in (3, 0, 1):
        use(tree, leaf)
    assert order(tree) == [2, 4, 3, 0, 1]


def test_lru_goes_by_the_end_of_a_use_not_its_beginning():
    tree = leaves("lru", 3)
    long = tree.lock(tree.match(np.array([0, 100], np.int32), SPACE))
    use(tree, 1)
    use(tree, 2)
    tree.unlock(long)
    assert order(tree) == [1, 2, 0]


def test_lfu_evicts_what_fewest_requests_used():
    tree = leaves("lfu")
    for leaf in (0, 0, 0, 1, 3, 3):
        use(tree, leaf)
    assert order(tree) == [2, 4, 1, 3, 0]


def test_slru_keeps_what_was_used_again_longer():
    tree = leaves("slru")
    for leaf in (1, 0, 4):
        use(tree, leaf)
    use(tree, 1)
    assert order(tree) == [2, 3, 0, 4, 1]


def test_slru_protects_no_more_than_four_of_five():
    tree = leaves("slru", 50, (0,) * 50)
    for leaf in range(50):
        use(tree, leaf)
    for leaf in range(50, 60):
        insert(tree, [leaf, 100], 10 * leaf)
    # 50 of 60 are protected: with each newcomer that goes one of them, the oldest, loses its protection, ten in all.
    assert order(tree)[:12] == [*range(50, 60), 0, 1]
    tree = leaves("slru", 10, (0,) * 10)
    for leaf in range(9):
        use(tree, leaf)
    assert tree.evict(1).tolist() == [90, 91]
    use(tree, 0)
    insert(tree, [20, 100], 200)
    assert order(tree)[:3] == [20, 1, 2]


def test_priority_evicts_the_lowest_first_and_a_use_may_raise_it():
    tree = leaves("priority", priorities=(5, -3, 0, 0, 1))
    use(tree, 2, priority=9)
    use(tree, 0, priority=2)
    use(tree, 3, priority=-7)
    assert order(tree) == [1, 3, 4, 0, 2]


def test_fifo_evicts_the_oldest_however_often_it_was_used():
    tree = leaves("fifo")
    for leaf in (0, 0, 2, 1):
        use(tree, leaf)
    assert order(tree) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("eviction", STRATEGIES)
def test_a_split_gives_both_parts_what_the_whole_was_worth(eviction):
    tree = RadixTree(1, eviction)
    insert(tree, [1, 2], 10, priority=4)
    use(tree, 1)
    tree.unlock(tree.lock(tree.match(np.array([1, 2], np.int32), SPACE)))
    insert(tree, [1, 3], 20, priority=1)
    upper, whole, new = sorted(tree.nodes(), key=lambda node: (node.end, node.key))
    assert (upper.pages.tolist(), whole.pages.tolist(), new.pages.tolist()) == ([10], [11], [21])
    # The first request that used all of [1, 2] matched [1, 2, ...] only up to the 1.
    assert (upper.uses, whole.uses, new.uses) == (3, 2, 1)
    assert (upper.priority, whole.priority, new.priority) == (4, 4, 1)
    assert upper.newest == new.newest > whole.newest


@pytest.mark.parametrize("eviction", STRATEGIES)
def test_a_prefix_goes_after_all_that_continue_it(eviction):
    tree = RadixTree(1, eviction)
    rng = np.random.default_rng(4)
    for _ in range(200):
        tokens = rng.integers(0, 2, rng.integers(1, 9)).astype(np.int32)
        tree.insert(tokens, np.zeros(len(tokens), np.int32), SPACE, int(rng.integers(-2, 3)))
        found = tree.match(rng.integers(0, 2, 9).astype(np.int32), SPACE)
        tree.unlock(tree.lock(found, int(rng.integers(-2, 3))))
        if rng.random() < 0.2:
            tree.evict(int(rng.integers(1, 9)))  # asserts that what it evicts has no children
    tree.evict(tree.evictable)
    assert not list(tree.nodes())


@pytest.mark.parametrize("eviction", STRATEGIES)
def test_evict_frees_what_is_asked_for_and_less_than_a_leaf_more(eviction):
    tree = RadixTree(1, eviction)
    for leaf in range(10):
        tree.insert(np.arange(8, dtype=np.int32) + 100 * leaf, np.arange(8, dtype=np.int32) + 8 * leaf, SPACE)
    assert tree.evict(9).tolist() == list(range(16)), "the two oldest leaves, and nothing else"
    assert tree.evict(0).size == 0
    assert tree.evict(1000).size == tree.evict(1).size + 64
    assert tree.evictable == 0


def lines_run(call):
    """How many lines of Python a call runs."""
    count = 0

    def tracer(frame, event, argument):
        nonlocal count
        count += event == "line"
        return tracer

    before = sys.gettrace()
    gc.disable()  # others' callbacks of the collector are Python, too
    sys.settrace(tracer)
    try:
        call()
    finally:
        sys.settrace(before)
        gc.enable()
    return count


@pytest.mark.parametrize("eviction", STRATEGIES)
def test_one_eviction_takes_as_many_steps_among_100000_leaves_as_among_100(eviction):
    def most_steps(count):
        tree = RadixTree(1, eviction)
        page = np.zeros(1, np.int32)
        tokens = np.arange(count, dtype=np.int32).reshape(count, 1)
        for token in tokens:
            tree.insert(token, page, SPACE)
        for token in tokens[1:]:  # all but the first were used since, in the order in which they would go
            tree.unlock(tree.lock(tree.match(token, SPACE)))
        return max(lines_run(lambda: tree.evict(1)) for _ in range(50))

    assert most_steps(100_000) <= most_steps(100)


@pytest.mark.parametrize("eviction", STRATEGIES)
def test_uses_without_evictions_leave_nothing_behind(eviction):
    tree = leaves(eviction)
    for round_ in range(500):
        use(tree, round_ % 5)
    assert len(tree._unlocked._levels) <= 5
    assert len(tree._unlocked._numbers) <= 2 * 5 + 9
    assert len(order(tree)) == 5
