"""The tree's rules, one by one."""

import numpy as np
import pytest

from gapless.radix_cache.tree import RadixTree

SPACE = ("extra_key", "")


def ids(*tokens):
    return np.array(tokens, np.int32)


def fill(tree, tokens, first_page=1, namespace=SPACE):
    pages = np.arange(first_page, first_page + len(tokens) // tree.page_size, dtype=np.int32)
    return tree.insert(ids(*tokens), pages, namespace)


def test_a_locked_match_is_not_evicted_until_it_is_unlocked():
    tree = RadixTree(1)
    fill(tree, range(1, 9))
    node = tree.lock(tree.match(ids(*range(1, 9)), SPACE))
    assert tree.evict(8).size == 0
    tree.unlock(node)
    assert sorted(tree.evict(8).tolist()) == list(range(1, 9))
    assert (tree.evictable, tree.protected) == (0, 0)


def test_a_lock_covers_only_what_matched_and_survives_a_split_below_and_above():
    tree = RadixTree(1)
    fill(tree, range(1, 9))
    node = tree.lock(tree.match(ids(1, 2, 3, 9), SPACE))
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
    before = [(id(node), node.key, node.uses) for node in tree.nodes()]
    match = tree.match(ids(0, 1, 2, 3, 9, 9), SPACE)
    assert (match.length, match.used, match.pages.tolist()) == (2, 2, [1, 2])
    assert [(id(node), node.key, node.uses) for node in tree.nodes()] == before


def test_a_match_stays_right_when_its_node_is_split_before_it_is_locked():
    tree = RadixTree(1)
    fill(tree, range(8))
    fill(tree, [0, 9], first_page=20)
    matches = [tree.match(ids(*range(end)), SPACE) for end in range(1, 9)]
    locked = [tree.lock(matches[end - 1]) for end in (3, 6, 5, 8)]
    assert [match.pages.tolist() for match in matches] == [list(range(1, end + 1)) for end in range(1, 9)]
    assert [node.end for node in locked] == [3, 6, 5, 8]
    for protected in (6, 6, 3, 0):
        tree.unlock(locked.pop())
        assert tree.protected == protected


@pytest.mark.parametrize("page_size", [1, 2, 3, 4, 16, 64])
def test_only_whole_pages_match(page_size):
    tree = RadixTree(page_size)
    tokens = np.arange(3 * page_size, dtype=np.int32)
    tree.insert(tokens, ids(7, 8, 9), SPACE)
    for length in range(len(tokens) + 1):
        assert tree.match(tokens[:length], SPACE).pages.tolist() == [7, 8, 9][: length // page_size]
        other = tokens.copy()
        other[length:] = -1
        assert tree.match(other, SPACE).length == length // page_size


@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_paths_branch_at_any_page(page_size):
    tree = RadixTree(page_size)
    tokens = np.arange(6 * page_size, dtype=np.int32)
    for page in range(6):
        branch = tokens.copy()
        branch[(page + 1) * page_size - 1 :] = -1 - page  # differs in the last token of the page
        tree.insert(branch, np.arange(6, dtype=np.int32) + 10 * page, SPACE)
        assert tree.match(tokens, SPACE).length == page
    assert tree.match(tokens, SPACE).pages.tolist() == [50 - 10 * (4 - page) + page for page in range(5)]
    assert tree.evictable == sum(node.pages.size for node in tree.nodes()) == 6 + 6 + 5 + 4 + 3 + 2


def test_the_first_to_insert_a_prefix_keeps_its_pages():
    tree = RadixTree(2)
    fill(tree, range(6), first_page=1)
    _, kept = fill(tree, [0, 1, 2, 3, 8, 9], first_page=11)
    assert kept.tolist() == [1, 2, 13]
    _, kept = fill(tree, [0, 1, 2, 3], first_page=21)
    assert kept.tolist() == [1, 2]


def test_namespaces_share_nothing():
    tree = RadixTree(1)
    fill(tree, [1, 2, 3], namespace=("extra_key", "X"))
    assert tree.match(ids(1, 2, 3), ("adapter", "X")).length == 0
    assert tree.match(ids(1, 2, 3), ("extra_key", "X")).length == 3


def test_namespaces_leave_nothing_behind():
    tree = RadixTree(1)
    for key in range(100):
        namespace = ("extra_key", str(key))
        tree.unlock(tree.lock(tree.match(ids(1, 2), namespace)))
        if key % 2:
            fill(tree, [1, 2], first_page=1 + 2 * key, namespace=namespace)
        fill(tree, [], namespace=namespace)
    assert len(tree._roots) == 50
    held = tree.lock(tree.match(ids(1, 2), ("extra_key", "99")))
    assert tree.evict(1000).size == 98
    assert list(tree._roots) == [("extra_key", "99")]
    tree.unlock(held)
    tree.evict(2)
    assert not tree._roots


def test_the_lock_of_an_emptied_namespace_can_still_be_returned():
    tree = RadixTree(1)
    fill(tree, [1])
    held = tree.lock(tree.match(ids(5), SPACE))
    tree.evict(1)
    node, _ = fill(tree, [5])
    tree.lock_node(node)
    tree.unlock(held)
    tree.unlock(node)
    assert (tree.evictable, tree.protected) == (1, 0)


def test_an_index_without_real_pages_can_be_emptied():
    tree = RadixTree(2)
    for last in range(10):
        tree.insert(ids(1, 2, 3, 4, last, last), np.zeros(3, np.int32), SPACE)
    held = tree.lock(tree.match(ids(1, 2, 3, 4, 5, 5), SPACE))
    assert (tree.evictable, tree.protected) == (9, 3)
    assert tree.evict(tree.evictable).tolist() == [0] * 9
    assert sorted(node.end for node in tree.nodes()) == [2, 3]
    tree.unlock(held)
    tree.evict(tree.evictable)
    assert not list(tree.nodes())


def test_a_deep_path_is_matched_from_end_to_end():
    tree = RadixTree(4)
    tokens = np.arange(2048, dtype=np.int32)
    for end in range(8, 2049, 8):
        tree.insert(tokens[:end], np.arange(end // 4, dtype=np.int32), SPACE)
    assert sum(1 for _ in tree.nodes()) == 256
    match = tree.match(np.append(tokens, 1).astype(np.int32), SPACE)
    assert (match.length, match.pages.tolist()) == (512, list(range(512)))
    node = tree.lock(match)
    assert (tree.evictable, tree.protected) == (0, 512)
    tree.unlock(node)
    assert tree.evict(1).tolist() == [510, 511]


def test_what_the_tree_returns_cannot_be_written_to():
    tree = RadixTree(1)
    _, kept = fill(tree, [1, 2])
    for pages in (kept, tree.match(ids(1, 2), SPACE).pages, tree.evict(1)):
        assert pages.dtype == np.int32
        with pytest.raises(ValueError, match="read-only"):
            pages[0] = 9
