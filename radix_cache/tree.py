"""A radix tree over pages of token ids (the RadixAttention of SGLang, Zheng et al. 2024).

A node holds a run of whole pages: their token ids and the numbers of the KV pages that keep them. Matching never
changes the tree; locking splits a node where a match ends inside it. A locked node protects the whole path to
its root. Sizes are counted in pages.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gapless.radix_cache.namespace import Namespace

Ids = NDArray[np.int32]
Pages = NDArray[np.int32]
_NONE = np.empty(0, np.int32)


class Node:
    """`ids` has page_size entries for each entry of `pages`; `children` are keyed by the bytes of their first page."""

    __slots__ = (
        "alive",
        "children",
        "ids",
        "last_use",
        "locks",
        "namespace",
        "pages",
        "parent",
        "queued",
        "serial",
    )

    def __init__(self, ids: Ids, pages: Pages, parent: Node | None, serial: int) -> None:
        self.ids, self.pages, self.parent, self.serial = ids, pages, parent, serial
        self.children: dict[bytes, Node] = {}
        self.namespace = Namespace()  # of a root
        self.locks = 0
        self.last_use = 0
        self.alive = True
        self.queued = False  # it has its one entry in the eviction heap


@dataclass(frozen=True)
class Match:
    """The longest cached prefix: the path down to `node`, of which `used` pages match; `pages` along all the path."""

    node: Node
    used: int
    pages: Pages


class RadixTree:
    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self.evictable = 0  # pages of unlocked nodes
        self.protected = 0  # pages of locked nodes
        self._roots: dict[Namespace, Node] = {}  # of the namespaces that hold pages
        self._nowhere = Node(_NONE, _NONE, None, 0)  # where a match in any other namespace ends
        self._clock = 0
        self._serial = 0
        # Each unlocked leaf has one entry (last use when queued, serial, node). A touch does not move the entry: it
        # is queued again when it comes up with an outdated time; what is no longer evictable is dropped then.
        self._heap: list[tuple[int, int, Node]] = []

    def match(self, ids: Ids, namespace: Namespace) -> Match:
        """The longest prefix of `ids`, in whole pages, that the namespace holds."""
        node, position, found = self._roots.get(namespace, self._nowhere), 0, []
        size, end = self.page_size, len(ids) - len(ids) % self.page_size
        used = 0
        while position < end:
            child = node.children.get(ids[position : position + size].tobytes())
            if child is None:
                break
            node = child
            used = self._common_pages(node, ids[position:end])
            found.append(node.pages[:used])
            position += used * size
            if used < len(node.pages):
                break
        return Match(node, used, np.concatenate(found) if found else _NONE)

    def lock(self, match: Match) -> Node:
        """Protects the matched pages until `unlock` of the node that is returned; they count as used now."""
        node = match.node
        if node.parent is not None and match.used < len(node.pages):
            node = self._split(node, match.used)
        self.lock_node(node)
        return node

    def lock_node(self, node: Node) -> None:
        self._clock += 1
        step: Node | None = node
        while step is not None:
            if step.locks == 0 and step.parent is not None:
                self.evictable -= len(step.pages)
                self.protected += len(step.pages)
            step.locks += 1
            step.last_use = self._clock
            step = step.parent

    def unlock(self, node: Node) -> None:
        step: Node | None = node
        while step is not None:
            assert step.locks > 0, "unlock without lock"
            step.locks -= 1
            if step.locks == 0 and step.parent is not None:
                self.evictable += len(step.pages)
                self.protected -= len(step.pages)
                self._queue(step)
            step = step.parent

    def insert(self, ids: Ids, pages: Pages, namespace: Namespace) -> tuple[Node, Pages]:
        """Adds `ids` (whole pages) kept in `pages`; returns the last node and the tree's own pages for all of `ids`.

        Where the tree had a prefix already, its pages win: the caller still owns those of `pages` that differ
        from the ones returned.
        """
        if namespace not in self._roots:
            root = self._roots[namespace] = self._new_node(_NONE, _NONE, None)
            root.namespace = namespace
        found = self.match(ids, namespace)
        held = len(found.pages)
        node = found.node
        if node.parent is not None and found.used < len(node.pages):
            node = self._split(node, found.used)
        self._clock += 1
        node.last_use = self._clock
        if held == len(pages):
            return node, found.pages
        child = self._new_node(ids[held * self.page_size :].copy(), pages[held:].copy(), node)
        child.last_use = self._clock
        node.children[self._edge(child)] = child
        self.evictable += len(child.pages)
        self._queue(child)
        return child, np.concatenate([found.pages, child.pages])

    def evict(self, count: int) -> Pages:
        """Removes unlocked leaves, least recently used first, until at least `count` pages are free or none is left."""
        freed: list[Pages] = []
        while count > 0 and self._heap:
            stamp, _, node = heapq.heappop(self._heap)
            node.queued = False
            if not self._is_evictable(node):
                continue
            if stamp != node.last_use:
                self._queue(node)
                continue
            freed.append(node.pages)
            count -= len(node.pages)
            self._remove(node)
        return np.concatenate(freed) if freed else _NONE

    def nodes(self) -> Iterator[Node]:
        """All nodes with pages, for checks."""
        stack = list(self._roots.values())
        while stack:
            node = stack.pop()
            stack.extend(node.children.values())
            if node.parent is not None:
                yield node

    def _new_node(self, ids: Ids, pages: Pages, parent: Node | None) -> Node:
        self._serial += 1
        return Node(ids, pages, parent, self._serial)

    def _edge(self, node: Node) -> bytes:
        return node.ids[: self.page_size].tobytes()

    def _common_pages(self, node: Node, ids: Ids) -> int:
        length = min(len(node.ids), len(ids))
        equal = node.ids[:length] == ids[:length]
        first_difference = int(equal.argmin()) if length else 0
        if length and equal[first_difference]:
            first_difference = length
        return first_difference // self.page_size

    def _split(self, lower: Node, used: int) -> Node:
        """Cuts a node after `used` pages. The lower part stays the same object, so that who locked it need not know."""
        assert lower.parent is not None
        cut = used * self.page_size
        upper = self._new_node(lower.ids[:cut], lower.pages[:used], lower.parent)
        upper.locks, upper.last_use = lower.locks, lower.last_use
        lower.parent.children[self._edge(upper)] = upper
        lower.ids, lower.pages, lower.parent = lower.ids[cut:], lower.pages[used:], upper
        upper.children[self._edge(lower)] = lower
        return upper

    def _is_evictable(self, node: Node) -> bool:
        return node.alive and node.locks == 0 and not node.children and node.parent is not None

    def _queue(self, node: Node) -> None:
        if not node.queued and self._is_evictable(node):
            node.queued = True
            heapq.heappush(self._heap, (node.last_use, node.serial, node))

    def _remove(self, node: Node) -> None:
        parent = node.parent
        assert parent is not None
        node.alive = False
        self.evictable -= len(node.pages)
        del parent.children[self._edge(node)]
        if parent.parent is None and not parent.children:
            del self._roots[parent.namespace]  # a client's many namespaces leave nothing behind
        self._queue(parent)
