"""A radix tree over pages of token ids (the RadixAttention of SGLang, Zheng et al. 2024).

A node holds a run of whole pages: their token ids and the numbers of the KV pages that keep them, both as bytes, so
that a whole node is compared or copied by one call. Matching never changes the tree; locking and inserting split a node
where a match ends inside it. A locked node protects the whole path to its root. Sizes are counted in pages.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator

import numpy as np
from numpy.typing import NDArray

from gapless.radix_cache.eviction import STRATEGIES

Ids = NDArray[np.int32]
Pages = NDArray[np.int32]
# Is given the namespace, the ids of the path that ends with the node, and the node's own pages (the last of the path).
OnEvict = Callable[[Hashable, Ids, Pages], None]
ID_BYTES = 4  # an id or a page number is an int32


class Node:
    """The pages `begin` to `end` of a path; `children` are keyed by the bytes of their first page."""

    __slots__ = (
        "alive",
        "begin",
        "children",
        "end",
        "key",
        "level",
        "locks",
        "namespace",
        "newest",
        "parent",
        "priority",
        "uses",
        "value",
    )

    def __init__(self, key: bytes, value: bytes, parent: Node | None, begin: int) -> None:
        self.key, self.value = key, value  # token ids, page numbers
        self.begin, self.end = begin, begin + len(value) // ID_BYTES
        self.parent = parent
        self.children: dict[bytes, Node] = {}
        self.namespace: Hashable = None  # of a root
        self.alive = True  # not evicted
        self.locks = 0  # its own, and one for each child that has any
        # What eviction goes by; none is less than in a child.
        self.uses = 1  # requests: the one that brought it, and those that matched it
        self.priority = 0  # the highest of these requests
        self.newest = 0  # when the newest node on a path through it was made
        self.level = 0  # belongs to the eviction strategy

    @property
    def pages(self) -> Pages:
        return np.frombuffer(self.value, np.int32)


class Match:
    """The longest cached prefix: `length` pages on the path that ends with `node`, of which `used` match."""

    __slots__ = ("_pages", "length", "node", "used", "values")

    def __init__(self, node: Node, length: int, values: list[bytes]) -> None:
        self.node, self.length = node, length
        self.used = length - node.begin
        self.values = values  # the page numbers in pieces
        self._pages: Pages | None = None

    @property
    def pages(self) -> Pages:
        """The matched pages, [length], read-only. They are what they were when the match was made."""
        if self._pages is None:
            self._pages = np.frombuffer(b"".join(self.values), np.int32)
        return self._pages


class RadixTree:
    """A namespace is anything that can be a key of a dictionary; namespaces share nothing."""

    def __init__(self, page_size: int, eviction: str = "lru", on_evict: OnEvict | None = None) -> None:
        """`eviction` names one of `STRATEGIES`. `on_evict` is called for each node before its pages are free."""
        self.page_size = page_size
        self.evictable = 0  # pages of unlocked nodes
        self.protected = 0  # pages of locked nodes
        self.insertions = 0  # inserts that added pages
        self._page_bytes = page_size * ID_BYTES
        self._unlocked = STRATEGIES[eviction]()
        self._on_evict = on_evict
        self._roots: dict[Hashable, Node] = {}  # of the namespaces that hold pages
        self._nowhere = Node(b"", b"", None, 0)  # where a match in any other namespace ends

    def match(self, ids: Ids, namespace: Hashable) -> Match:
        """The longest prefix of `ids`, in whole pages, that the namespace holds."""
        return self._walk(ids.tobytes(), namespace)

    def lock(self, match: Match, priority: int = 0) -> Node:
        """Protects the matched pages until `unlock` of the node that is returned; they count as used once more."""
        node = self._end_of(match)
        self.lock_node(node)
        self._mark(node, 1, 0, priority)
        return node

    def lock_node(self, node: Node) -> None:
        """Protects the path that ends with the node once more; nothing counts as used."""
        step = node
        while True:
            step.locks += 1
            if step.locks > 1 or step.parent is None:
                return
            self.evictable -= step.end - step.begin
            self.protected += step.end - step.begin
            self._unlocked.remove(step)
            step = step.parent

    def unlock(self, node: Node) -> None:
        """Undoes one `lock` or `lock_node`: what nothing else protects is the most recently used now."""
        step = node
        while True:
            assert step.locks > 0, "unlock without lock"
            step.locks -= 1
            if step.locks or step.parent is None:
                return
            self.evictable += step.end - step.begin
            self.protected -= step.end - step.begin
            self._unlocked.add(step)
            step = step.parent

    def insert(self, ids: Ids, pages: Pages, namespace: Hashable, priority: int = 0) -> tuple[Node, Pages]:
        """Adds `ids` (whole pages) kept in `pages`; returns the last node and the tree's own pages for all of `ids`.

        Where the tree had a prefix already, its pages win: the caller still owns those of `pages` that differ
        from the ones returned, which are read-only.
        """
        assert len(ids) == len(pages) * self.page_size and ids.dtype == pages.dtype == np.int32
        data = ids.tobytes()
        found = self._walk(data, namespace)
        if found.length == len(pages):
            node = self._end_of(found)
            self.lock_node(node)
            self._mark(node, 0, 0, priority)
        else:
            node = self._add(found, data, pages, namespace)
            node.priority = priority  # may be below 0
            self._mark(node, 0, self.insertions, priority)
        self.unlock(node)
        return node, found.pages

    def evict(self, count: int) -> Pages:
        """Removes unlocked leaves, as the strategy has it, until at least `count` pages are free or none is left.

        Returns the pages of what was removed: less than one leaf more than `count`.
        """
        freed: list[bytes] = []
        count = min(count, self.evictable)
        while count > 0:
            node = self._unlocked.pop()
            assert node is not None and not node.children, "the order of eviction is broken"
            if self._on_evict is not None:
                self._on_evict(*self._path(node), node.pages)
            freed.append(node.value)
            count -= node.end - node.begin
            self._remove(node)
        return np.frombuffer(b"".join(freed), np.int32)

    def nodes(self) -> Iterator[Node]:
        """All nodes with pages, for checks."""
        stack = list(self._roots.values())
        while stack:
            node = stack.pop()
            stack.extend(node.children.values())
            if node.parent is not None:
                yield node

    def _walk(self, data: bytes, namespace: Hashable) -> Match:
        at, page_bytes = 0, self._page_bytes
        node, values = self._roots.get(namespace, self._nowhere), []
        while (child := node.children.get(data[at : at + page_bytes])) is not None:
            node = child
            if not data.startswith(node.key, at):
                used = self._common_pages(node.key, data, at)
                values.append(node.value[: used * ID_BYTES])
                return Match(node, node.begin + used, values)
            values.append(node.value)
            at += len(node.key)
        return Match(node, node.end, values)

    def _common_pages(self, key: bytes, data: bytes, at: int) -> int:
        """In how many first pages `key` agrees with `data` from byte `at` on."""
        count = min(len(key), len(data) - at) // ID_BYTES
        differ = np.frombuffer(key, np.int32, count) != np.frombuffer(data, np.int32, count, at)
        first = int(differ.argmax())
        return (first if differ[first] else count) // self.page_size

    def _end_of(self, match: Match) -> Node:
        """The node with which the matched pages end, made by a split where there is none."""
        node = match.node
        assert node.alive, "what was matched is evicted"
        while node.begin >= match.length and node.parent is not None:  # it was split since the match
            node = node.parent
        return self._split(node, match.length) if match.length < node.end else node

    def _split(self, lower: Node, end: int) -> Node:
        """Makes the part of a node up to page `end` of its path its parent, which the caller locks at once.

        The lower part stays the same object, so that who locked it need not know.
        """
        parent, pages = lower.parent, end - lower.begin
        assert parent is not None
        cut = pages * self._page_bytes
        upper = Node(lower.key[:cut], lower.value[: pages * ID_BYTES], parent, lower.begin)
        upper.uses, upper.priority, upper.newest = lower.uses, lower.priority, lower.newest
        parent.children[self._edge(upper)] = upper
        lower.key, lower.value = lower.key[cut:], lower.value[pages * ID_BYTES :]
        lower.begin, lower.parent = end, upper
        upper.children[self._edge(lower)] = lower
        if lower.locks:
            upper.locks = 1
        else:
            self._unlocked.add(upper)  # behind its parent, until it is locked
        return upper

    def _add(self, found: Match, data: bytes, pages: Pages, namespace: Hashable) -> Node:
        """A new node for all that was not found; it is locked, and its value is added to the match's."""
        parent = self._end_of(found)
        if parent is self._nowhere:
            parent = self._roots[namespace] = Node(b"", b"", None, 0)
            parent.namespace = namespace
        self.lock_node(parent)  # this lock stands for the child's
        key, value = data[found.length * self._page_bytes :], pages[found.length :].tobytes()
        node = Node(key, value, parent, found.length)
        node.locks = 1
        parent.children[self._edge(node)] = node
        found.values.append(node.value)
        self.protected += node.end - node.begin
        self.insertions += 1
        return node

    def _mark(self, node: Node, uses: int, newest: int, priority: int) -> None:
        """Notes a use in the whole path, which is locked."""
        step: Node | None = node
        while step is not None:
            step.uses += uses
            if priority > step.priority:
                step.priority = priority
            if newest > step.newest:
                step.newest = newest
            step = step.parent

    def _remove(self, node: Node) -> None:
        parent = node.parent
        assert parent is not None
        node.alive = False
        self.evictable -= node.end - node.begin
        del parent.children[self._edge(node)]
        if parent.parent is None and not parent.children:
            del self._roots[parent.namespace]  # a client's many namespaces leave nothing behind

    def _edge(self, node: Node) -> bytes:
        return node.key[: self._page_bytes]

    def _path(self, node: Node) -> tuple[Hashable, Ids]:
        """The namespace, and the ids of the path that ends with the node."""
        keys = [node.key]
        while node.parent is not None:
            node = node.parent
            keys.append(node.key)
        return node.namespace, np.frombuffer(b"".join(reversed(keys)), np.int32)
