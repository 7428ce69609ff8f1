"""The pool's books: versions, flushes, lower tiers."""

import numpy as np
import pytest

from gapless.radix_cache.cache import PrefixCache
from gapless.radix_cache.namespace import Namespace


def ids(*tokens):
    return np.array(tokens, np.int32)


def serve(cache, tokens, namespace=None):
    """A request that computes `tokens` and ends; how many it found cached."""
    namespace = namespace or Namespace(weights=cache.version)
    tokens = ids(*tokens)
    match = cache.match(tokens, namespace)
    held = cache.lock(match)
    pages = np.concatenate([match.pages, cache.take(len(tokens) // cache.page_size - match.length)])
    held, kept = cache.publish(tokens, pages, namespace, held)
    assert kept.tolist() == pages.tolist()
    cache.unlock(held)
    return match.length * cache.page_size


def test_a_prefix_that_is_locked_survives_the_eviction_for_its_own_tail():
    cache = PrefixCache(32, 1)
    serve(cache, range(16))
    serve(cache, range(100, 116))
    match = cache.match(ids(*range(32)), Namespace())
    held = cache.lock(match)
    assert (match.length, cache.available) == (16, 16)
    own = cache.take(16)
    assert cache.available == 0 and not set(own.tolist()) & set(match.pages.tolist())
    cache.unlock(held)
    cache.give_back(own)
    assert cache.match(ids(*range(16)), Namespace()).length == 16
    cache.check_idle()


NAMESPACES = [
    Namespace(),
    Namespace(extra_key="X"),
    Namespace(cache_salt="X"),
    Namespace(adapter="X"),
    Namespace(extra_key="X", cache_salt="X"),
    Namespace(weights=1),
]


@pytest.mark.parametrize("first", NAMESPACES)
def test_salt_key_adapter_and_weights_share_nothing_whatever_their_names(first):
    cache = PrefixCache(64, 2)
    serve(cache, range(8), first)
    assert [serve(cache, range(8), space) for space in NAMESPACES] == [
        8 * (space == first) for space in NAMESPACES
    ]


def test_other_weights_find_nothing_of_the_old_ones():
    cache = PrefixCache(64, 4)
    assert [serve(cache, range(16)) for _ in range(2)] == [0, 16]
    assert (cache.version, cache.flush(), cache.version) == (0, 4, 1)
    assert [serve(cache, range(16)) for _ in range(2)] == [0, 16]
    cache.check_idle()


def test_a_flush_leaves_running_requests_their_pages():
    cache = PrefixCache(16, 1)
    old = Namespace(weights=cache.version)
    serve(cache, range(8))
    held = cache.lock(cache.match(ids(*range(6)), old))
    own = cache.take(2)
    assert (cache.flush(), cache.available, cache.used_pages) == (2, 8, 8)
    assert cache.flush() == 0
    held, kept = cache.publish(
        ids(*range(6), 9, 9), np.concatenate([cache.match(ids(*range(6)), old).pages, own]), old, held
    )
    assert kept[6:].tolist() == own.tolist()
    assert cache.match(ids(*range(6)), Namespace(weights=cache.version)).length == 0
    cache.unlock(held)
    cache.check_idle()
    assert len(cache.take(16)) == 16


def test_what_could_be_matched_has_changed_after_new_pages_and_after_a_flush():
    cache = PrefixCache(64, 1)
    seen = [cache.changes]
    for step in (
        lambda: serve(cache, [1, 2, 3]),
        lambda: serve(cache, [1, 2, 4]),
        cache.flush,
        lambda: serve(cache, [1, 2, 3]),
    ):
        step()
        seen.append(cache.changes)
    assert seen == sorted(set(seen))
    serve(cache, [1, 2])
    cache.match(ids(1, 2), Namespace(weights=1))
    assert cache.changes == seen[-1]


def test_a_cache_that_is_off_matches_nothing():
    cache = PrefixCache(8, 1, enabled=False)
    serve(cache, range(4))
    assert cache.match(ids(*range(4)), Namespace()).length == 0


def test_an_unknown_strategy_is_refused():
    with pytest.raises(KeyError, match="mru"):
        PrefixCache(8, 1, eviction="mru")


class HostTier:
    """What a lower tier needs of the tree: it keeps what is evicted, by the path that leads to each page."""

    def __init__(self, pool, page_size):
        self.pool, self.page_size, self.kept = pool, page_size, {}

    def keep(self, namespace, path, pages):
        for at, page in enumerate(pages, len(path) // self.page_size - len(pages) + 1):
            self.kept[namespace, path[: at * self.page_size].tobytes()] = self.pool[page]

    def bring_back(self, cache, tokens, namespace):
        """Fills the pages that come after what is cached, as far as this tier has them."""
        match = cache.match(tokens, namespace)
        ends = range((match.length + 1) * self.page_size, len(tokens) + 1, self.page_size)
        values = [self.kept.get((namespace, tokens[:end].tobytes())) for end in ends]
        count = values.index(None) if None in values else len(values)
        held = cache.lock(match)
        pages = np.concatenate([match.pages, cache.take(count)])
        self.pool[pages[match.length :]] = values[:count]
        held, _ = cache.publish(tokens[: len(pages) * self.page_size], pages, namespace, held)
        cache.unlock(held)


def test_a_lower_tier_sees_what_is_evicted_and_can_bring_it_back():
    pool, space = np.zeros(13), Namespace("a")
    tier = HostTier(pool, 2)
    cache = PrefixCache(12, 2, on_evict=tier.keep)
    long, short = range(16), [*range(6), 90, 91]
    for tokens in (long, short):
        serve(cache, tokens, space)
        pages = cache.match(ids(*tokens), space).pages
        pool[pages] = [
            sum(tokens[: 2 * at]) for at in range(1, len(pages) + 1)
        ]  # the "KV" of a page: its history
    serve(cache, range(50, 74), Namespace("b"))
    assert cache.match(ids(*long), space).length == 0 and len(tier.kept) == 9
    pool[:] = -1
    tier.bring_back(cache, ids(*long, 7, 7), space)
    tier.bring_back(cache, ids(*short), space)
    for tokens in (long, short):
        pages = cache.match(ids(*tokens), space).pages
        assert pool[pages].tolist() == [sum(tokens[: 2 * at]) for at in range(1, len(tokens) // 2 + 1)]
    cache.check_idle()
