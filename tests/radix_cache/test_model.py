"""The cache against a naive model: a dictionary from cached prefixes to pages, and lists of what requests hold."""

import random
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from gapless.radix_cache.cache import PrefixCache
from gapless.radix_cache.eviction import STRATEGIES
from gapless.radix_cache.namespace import Namespace

POOL = 40  # pages
SPACES = [Namespace(), Namespace(cache_salt="a"), Namespace(adapter="a")]


@dataclass
class Cached:
    """One page in the tree, and what eviction goes by."""

    page: int
    priority: int
    uses: int = 1
    newest: int = 0
    released: int = 0


LEVELS = {
    "lru": lambda cached: 0,
    "lfu": lambda cached: cached.uses,
    "priority": lambda cached: cached.priority,
    "fifo": lambda cached: cached.newest,
}


@dataclass
class Running:
    space: Namespace
    tokens: tuple
    priority: int
    held: object
    shared: int  # pages that are the tree's
    pages: list


class Books:
    """Does to the cache and to the model the same, and compares. A prefix is a namespace and a tuple of tokens."""

    def __init__(self, page_size, eviction):
        self.size, self.eviction = page_size, eviction
        self.cache = PrefixCache(POOL, page_size, eviction=eviction, on_evict=self.evicted)
        self.cached: dict[tuple, Cached] = {}
        self.running: list[Running] = []
        self.time = 0
        self.freed: list[int] = []  # sizes of the nodes evicted by the call that is under way

    def prefixes(self, space, tokens):
        return [(space, tuple(tokens[:end])) for end in range(self.size, len(tokens) + 1, self.size)]

    def protected(self):
        return {
            p
            for request in self.running
            for p in self.prefixes(request.space, request.tokens)[: request.shared]
        }

    def owned(self):
        return [page for request in self.running for page in request.pages[request.shared :]]

    # ---------------------------------------------------------------- operations

    def match(self, space, tokens):
        space = space._replace(weights=self.cache.version)
        found = self.cache.match(np.array(tokens, np.int32), space)
        want = [self.cached[p].page for p in self.prefixes(space, tokens) if p in self.cached]
        assert (found.length, found.pages.tolist()) == (len(want), want)
        return space, found

    def admit(self, space, tokens, priority):
        """A request comes: it locks what it can share and takes the rest, if there is as much."""
        space, found = self.match(space, tokens)
        prefixes = self.prefixes(space, tokens)
        held = self.cache.lock(found, priority)
        request = Running(space, tuple(tokens), priority, held, found.length, found.pages.tolist())
        self.running.append(request)
        for prefix in prefixes[: found.length]:
            self.cached[prefix].uses += 1
            self.cached[prefix].priority = max(self.cached[prefix].priority, priority)
        wanted = len(prefixes) - found.length
        if wanted > self.cache.available:
            self.leave(request)
            return
        short = wanted - (POOL - len(self.cached) - len(self.owned()))
        self.freed = []
        pages = self.cache.take(wanted).tolist()
        assert sum(self.freed) >= short and sum(self.freed[:-1]) < max(short, 1)
        request.pages += pages

    def publish(self, request, count):
        """The first `count` pages of the request are computed."""
        count = max(min(count, len(request.pages)), request.shared)
        ids = np.array(request.tokens[: count * self.size], np.int32)
        own = np.array(request.pages[:count], np.int32)
        changes = self.cache.changes
        request.held, kept = self.cache.publish(ids, own, request.space, request.held, request.priority)
        prefixes = self.prefixes(request.space, request.tokens)[:count]
        new = [prefix for prefix in prefixes if prefix not in self.cached]
        for prefix, page in zip(prefixes, own.tolist(), strict=True):
            cached = self.cached.setdefault(prefix, Cached(page, request.priority))
            cached.priority = max(cached.priority, request.priority)
        self.time += 1
        for prefix in prefixes if new else ():
            self.cached[prefix].newest = self.time
        assert kept.tolist() == [self.cached[prefix].page for prefix in prefixes]
        assert (self.cache.changes > changes) == bool(new)
        self.cache.give_back(own[own != kept])
        request.pages[:count], request.shared = kept.tolist(), count

    def leave(self, request):
        self.running.remove(request)
        self.cache.unlock(request.held)
        self.cache.give_back(np.array(request.pages[request.shared :], np.int32))
        self.time += 1
        released = set(self.prefixes(request.space, request.tokens)[: request.shared]) - self.protected()
        for prefix in released:
            self.cached[prefix].released = self.time

    def flush(self):
        unlocked, changes = len(self.cached.keys() - self.protected()), self.cache.changes
        assert self.cache.flush() == unlocked
        assert self.cache.changes > changes and self.cached.keys() == self.protected()

    def evicted(self, space, ids, pages):
        """Called by the tree for each node: its end must be the prefix that the strategy puts first."""
        path = self.prefixes(space, ids.tolist())
        protected = self.protected()
        inner = {(space, tokens[: -self.size]) for space, tokens in self.cached}
        if self.eviction in LEVELS:
            level = LEVELS[self.eviction]
            leaves = {
                prefix: cached for prefix, cached in self.cached.items() if prefix not in inner | protected
            }
            first = min(leaves, key=lambda prefix: (level(leaves[prefix]), leaves[prefix].released))
            assert path[-1] == first
        assert path[-1] not in inner
        for prefix, page in zip(path[-len(pages) :], pages.tolist(), strict=True):
            assert prefix not in protected and self.cached.pop(prefix).page == page
        self.freed.append(len(pages))

    # ---------------------------------------------------------------- comparison

    def check(self):
        tree: dict[tuple, int] = {}
        for node in self.cache.nodes():
            assert len(node.key) == 4 * self.size * len(node.pages) > 0
            keys, root = [], node
            while root.parent is not None:
                keys.insert(0, np.frombuffer(root.key, np.int32))
                assert root.parent.children[root.key[: 4 * self.size]] is root
                root = root.parent
            path = self.prefixes(root.namespace, np.concatenate(keys).tolist())
            assert len(path) == node.end == node.begin + len(node.pages)
            tree.update(zip(path[node.begin :], node.pages.tolist(), strict=True))
        assert tree == {prefix: cached.page for prefix, cached in self.cached.items()}
        protected, owned = self.protected(), self.owned()
        owners = [*tree.values(), *owned]
        assert len(owners) == len(set(owners)) and set(owners) <= set(range(1, POOL + 1))
        assert self.cache.available == POOL - len(protected) - len(owned)
        assert self.cache.used_pages == len(protected) + len(owned)

    def close(self):
        while self.running:
            self.leave(self.running[-1])
        self.check()
        self.cache.check_idle()


TOKENS = st.lists(st.integers(0, 2), max_size=24)
NUMBER = st.integers(0, 1000)


class CacheMachine(RuleBasedStateMachine):
    @initialize(page_size=st.integers(1, 4), eviction=st.sampled_from(list(STRATEGIES)))
    def begin(self, page_size, eviction):
        self.books = Books(page_size, eviction)

    @rule(space=st.sampled_from(SPACES), tokens=TOKENS)
    def match(self, space, tokens):
        self.books.match(space, tokens)

    @rule(space=st.sampled_from(SPACES), tokens=TOKENS, priority=st.integers(-2, 2))
    def admit(self, space, tokens, priority):
        self.books.admit(space, tokens, priority)

    @rule(number=NUMBER, count=st.integers(0, 24))
    def publish(self, number, count):
        if self.books.running:
            self.books.publish(self.books.running[number % len(self.books.running)], count)

    @rule(number=NUMBER)
    def leave(self, number):
        if self.books.running:
            self.books.leave(self.books.running[number % len(self.books.running)])

    @rule()
    def flush(self):
        self.books.flush()

    @invariant()
    def books_agree(self):
        if hasattr(self, "books"):
            self.books.check()

    def teardown(self):
        if hasattr(self, "books"):
            self.books.close()


TestCache = CacheMachine.TestCase
TestCache.settings = settings(max_examples=60, stateful_step_count=50, deadline=None)


@pytest.mark.parametrize(
    ("page_size", "eviction"), [(1, "lru"), (4, "lru"), (2, "lfu"), (3, "slru"), (4, "priority"), (1, "fifo")]
)
def test_a_long_random_walk_agrees_with_the_model_after_each_of_5000_operations(page_size, eviction):
    rng = random.Random(page_size)
    books = Books(page_size, eviction)
    seen = dict.fromkeys(("match", "admit", "publish", "leave", "flush", "evict"), 0)
    for _ in range(5000):
        space = rng.choice(SPACES)
        tokens = rng.choices(range(3), weights=(6, 2, 1), k=rng.randrange(20 * page_size))
        operation = rng.choices(("match", "admit", "publish", "leave", "flush"), (20, 40, 30, 24, 0.3))[0]
        if operation == "match":
            books.match(space, tokens)
        elif operation == "admit":
            books.freed = []
            books.admit(space, tokens, rng.randrange(-2, 3))
            seen["evict"] += len(books.freed)
        elif operation == "flush":
            books.flush()
        elif books.running:
            request = rng.choice(books.running)
            if operation == "publish":
                books.publish(request, rng.randrange(24))
            else:
                books.leave(request)
        seen[operation] += 1
        books.check()
    books.close()
    assert min(seen.values()) >= 5 and seen["evict"] > 200, seen
