"""The lazy heap against a sort."""

import gc
import random
import weakref

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from gapless.runtime.policies.heap import LazyHeap


class HeapMachine(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.heap = LazyHeap()
        self.keys = {}

    @rule(item=st.integers(0, 30), key=st.integers(0, 5))
    def push(self, item, key):
        if item not in self.keys:
            self.heap.push(item, (key, item))
            self.keys[item] = (key, item)

    @precondition(lambda self: self.keys)
    @rule(data=st.data(), again=st.booleans(), key=st.integers(0, 5))
    def remove(self, data, again, key):
        item = data.draw(st.sampled_from(sorted(self.keys)))
        self.heap.remove(item)
        del self.keys[item]
        if again:
            self.push(item, key)

    @precondition(lambda self: self.keys)
    @rule()
    def remove_first(self):
        item = self.heap.first()
        self.heap.remove(item)
        del self.keys[item]

    @rule()
    def look(self):
        assert self.heap.first() == min(self.keys, key=self.keys.get, default=None)

    @invariant()
    def holds_what_is_alive_and_at_most_as_many_dead(self):
        assert len(self.heap) == len(self.keys) and set(self.heap) == set(self.keys)
        assert all((item in self.heap) == (item in self.keys) for item in range(31))
        assert len(self.heap._entries) <= 2 * len(self.keys)


TestHeap = HeapMachine.TestCase
TestHeap.settings = settings(max_examples=40)


def test_what_was_removed_is_let_go():
    class Item:
        pass

    heap, rng = LazyHeap(), random.Random(0)
    items = [Item() for _ in range(1000)]
    for number, item in enumerate(items):
        heap.push(item, (number,))
    alive = weakref.WeakSet(items)
    rng.shuffle(items)
    while items:
        heap.remove(items.pop())
        gc.collect(0)
        assert len(alive) <= 2 * len(items) + 1  # the loop variable above holds one
    del item
    gc.collect()
    assert not alive


def test_misuse_raises():
    heap = LazyHeap()
    with pytest.raises(AssertionError):
        heap.remove("a")
    heap.push("a", (1,))
    with pytest.raises(AssertionError):
        heap.push("a", (2,))
