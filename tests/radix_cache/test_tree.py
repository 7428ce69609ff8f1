"""The tree against a naive model, and its rules one by one."""

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from gapless.radix_cache.cache import PrefixCache
from gapless.radix_cache.tree import RadixTree

NS = ("extra_key", "")


def ids(*tokens):
    return np.array(tokens, np.int32)


def fill(tree, tokens, first_page=1, namespace=NS):
    pages = np.arange(first_page, first_page + len(tokens) // tree.page_size, dtype=np.int32)
    return tree.insert(ids(*tokens), pages, namespace)


def test_a_locked_match_is_not_evicted_until_it_is_unlocked():
    tree = RadixTree(1)
    fill(tree, range(1, 9))
    node = tree.lock(tree.match(ids(*range(1, 9)), NS))
    assert tree.evict(8).size == 0
    tree.unlock(node)
    assert sorted(tree.evict(8).tolist()) == list(range(1, 9))
    assert (tree.evictable, tree.protected) == (0, 0)


def test_a_lock_covers_only_what_matched_and_survives_a_split_below_and_above():
    tree = RadixTree(1)
    fill(tree, range(1, 9))
    node = tree.lock(tree.match(ids(1, 2, 3, 9), NS))
    assert (tree.protected, tree.evictable) == (3, 5)
    fill(tree, [1, 2, 3, 4, 7], first_page=20)
    fill(tree, [1, 2, 60], first_page=30)
    assert tree.protected == 3
    tree.unlock(node)
    assert tree.evict(100).size == 8 + 1 + 1
    assert tree.evictable == 0


def test_matching_changes_nothing():
    tree = RadixTree(2)
    fill(tree, range(8))
    before = sorted(len(node.pages) for node in tree.nodes())
    match = tree.match(ids(0, 1, 2, 3, 9, 9), NS)
    assert match.pages.tolist() == [1, 2]
    assert sorted(len(node.pages) for node in tree.nodes()) == before


def test_only_whole_pages_match():
    tree = RadixTree(4)
    fill(tree, range(8))
    assert tree.match(ids(*range(7)), NS).pages.tolist() == [1]
    assert tree.match(ids(0, 1, 2), NS).pages.size == 0


def test_the_first_to_insert_a_prefix_keeps_its_pages():
    tree = RadixTree(2)
    fill(tree, range(6), first_page=1)
    _, kept = fill(tree, [0, 1, 2, 3, 8, 9], first_page=11)
    assert kept.tolist() == [1, 2, 13]


def test_namespaces_share_nothing():
    tree = RadixTree(1)
    fill(tree, [1, 2, 3], namespace=("extra_key", "X"))
    assert tree.match(ids(1, 2, 3), ("adapter", "X")).pages.size == 0
    assert tree.match(ids(1, 2, 3), ("extra_key", "X")).pages.size == 3


def test_namespaces_leave_nothing_behind():
    tree = RadixTree(1)
    for key in range(100):
        namespace = ("extra_key", str(key))
        tree.unlock(tree.lock(tree.match(ids(1, 2), namespace)))
        if key % 2:
            fill(tree, [1, 2], first_page=1 + 2 * key, namespace=namespace)
    assert len(tree._roots) == 50
    held = tree.lock(tree.match(ids(1, 2), ("extra_key", "99")))
    assert tree.evict(1000).size == 98
    assert list(tree._roots) == [("extra_key", "99")]
    tree.unlock(held)
    tree.evict(2)
    assert not tree._roots


def test_eviction_is_least_recently_used_first_and_frees_less_than_a_leaf_more():
    tree = RadixTree(1)
    for leaf in range(10):
        fill(tree, [100 + leaf, *range(7)], first_page=1 + 8 * leaf)
    tree.unlock(tree.lock(tree.match(ids(100), NS)))  # splits and touches the oldest
    tree.unlock(tree.lock(tree.match(ids(100, *range(7)), NS)))
    freed = tree.evict(9)
    assert sorted(freed.tolist()) == list(range(9, 25)), "leaves 1 and 2, and nothing else"
    assert tree.match(ids(100, *range(7)), NS).pages.size == 8


def test_a_prefix_that_is_locked_survives_the_eviction_for_its_own_tail():
    cache = PrefixCache(32, 1)
    prefix = np.arange(16, dtype=np.int32)
    root = cache.lock(cache.match(prefix, NS))
    held, _ = cache.publish(prefix, cache.take(16), NS, root)
    cache.unlock(held)
    other = cache.take(8)
    match = cache.match(np.arange(31, dtype=np.int32), NS)
    locked = cache.lock(match)
    assert (len(match.pages), cache.available) == (16, 8)
    cache.give_back(other)
    cache.give_back(cache.take(16))
    cache.unlock(locked)
    cache.check_idle()


SEQUENCES = st.lists(st.integers(0, 2), min_size=1, max_size=24)


class TreeMachine(RuleBasedStateMachine):
    """Against a dictionary from cached prefixes (tuples of whole pages) to the page that keeps their end."""

    @initialize(page_size=st.sampled_from([1, 2, 3]))
    def begin(self, page_size):
        self.tree = RadixTree(page_size)
        self.known: dict[tuple, int] = {}
        self.locks: list[tuple] = []  # node, the prefix it protects
        self.next_page = 1

    def prefixes(self, tokens):
        size = self.tree.page_size
        return [tuple(tokens[:end]) for end in range(size, len(tokens) + 1, size)]

    @rule(tokens=SEQUENCES)
    def insert(self, tokens):
        prefixes = self.prefixes(tokens)
        pages = np.arange(self.next_page, self.next_page + len(prefixes), dtype=np.int32)
        self.next_page += len(prefixes)
        _, kept = self.tree.insert(ids(*tokens[: len(prefixes) * self.tree.page_size]), pages, NS)
        for prefix, page in zip(prefixes, pages.tolist(), strict=True):
            self.known.setdefault(prefix, page)
        assert kept.tolist() == [self.known[prefix] for prefix in prefixes]

    @rule(tokens=SEQUENCES)
    def match(self, tokens):
        want = [self.known[prefix] for prefix in self.prefixes(tokens) if prefix in self.known]
        assert self.tree.match(ids(*tokens), NS).pages.tolist() == want

    @rule(tokens=SEQUENCES)
    def lock(self, tokens):
        found = self.tree.match(ids(*tokens), NS)
        prefix = tuple(tokens[: len(found.pages) * self.tree.page_size])
        self.locks.append((self.tree.lock(found), prefix))

    @rule(data=st.data())
    def unlock(self, data):
        if self.locks:
            self.tree.unlock(self.locks.pop(data.draw(st.integers(0, len(self.locks) - 1)))[0])

    @rule(count=st.integers(1, 12))
    def evict(self, count):
        free = self.tree.evictable
        freed = set(self.tree.evict(count).tolist())
        assert len(freed) >= min(count, free)
        gone = {prefix for prefix, page in self.known.items() if page in freed}
        assert len(gone) == len(freed)
        for prefix in gone:
            del self.known[prefix]
        for prefix in self.known:
            shorter = self.prefixes(prefix)[:-1]
            assert all(p in self.known for p in shorter), "an inner page was evicted before its leaf"

    @invariant()
    def sizes_and_owners_agree(self):
        if not hasattr(self, "tree"):
            return
        protected = {p for _, prefix in self.locks for p in self.prefixes(prefix)}
        assert protected <= set(self.known)
        assert self.tree.protected == len(protected)
        assert self.tree.evictable == len(self.known) - len(protected)
        owned = sorted(int(p) for node in self.tree.nodes() for p in node.pages)
        assert owned == sorted(self.known.values())


TestTree = TreeMachine.TestCase
TestTree.settings = settings(max_examples=60, stateful_step_count=50, deadline=None)
