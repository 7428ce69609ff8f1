"""The KV pool's books: the tree owns cached pages, requests own what they took, the allocator owns the rest."""

from __future__ import annotations

from collections.abc import Iterator

from gapless.radix_cache.allocator import PageAllocator, Pages
from gapless.radix_cache.namespace import Namespace
from gapless.radix_cache.tree import Ids, Match, Node, OnEvict, RadixTree


class PrefixCache:
    """The order of use is: match, lock, look at `available`, take (which may evict), and at the end publish and unlock.

    With `enabled` false nothing is ever matched or published; the calls and their meaning stay the same.

    A lower tier (host memory, disk, another machine) hangs below the tree by `on_evict`: it sees the namespace, the ids
    and the pages of what is about to be evicted, and may start to copy it. To bring it back it takes pages, fills
    them and publishes them. Pages of a namespace whose `weights` is not `version` are not worth keeping.
    """

    def __init__(
        self,
        pages: int,
        page_size: int,
        *,
        enabled: bool = True,
        eviction: str = "lru",
        on_evict: OnEvict | None = None,
    ) -> None:
        """`eviction` names one of `eviction.STRATEGIES`."""
        self.page_size = page_size
        self.enabled = enabled
        self.version = 0  # of the weights: what a namespace must have for its pages to be of use
        self._allocator = PageAllocator(pages)
        self._tree = RadixTree(page_size, eviction, on_evict)
        self._headroom = pages // 256  # evicted beyond what is asked for, so that not every take evicts

    @property
    def total_pages(self) -> int:
        return self._allocator.total

    @property
    def available(self) -> int:
        """Pages that `take` can give: free ones, and cached ones that no request uses."""
        return self._allocator.free_pages + self._tree.evictable

    @property
    def used_pages(self) -> int:
        """Pages that requests hold or share now."""
        return self.total_pages - self.available

    @property
    def changes(self) -> int:
        """Grows whenever what a waiting request could match may have: by an insert of new pages, or a flush."""
        return self._tree.insertions + self.version

    def match(self, ids: Ids, namespace: Namespace) -> Match:
        return self._tree.match(ids if self.enabled else ids[:0], namespace)

    def lock(self, match: Match, priority: int = 0) -> Node:
        return self._tree.lock(match, priority)

    def unlock(self, node: Node) -> None:
        self._tree.unlock(node)

    def take(self, count: int) -> Pages:
        """`count` pages (at most `available`), evicting what is needed."""
        short = count - self._allocator.free_pages
        if short > 0:
            self._allocator.give_back(self._tree.evict(short + self._headroom))
        return self._allocator.take(count)

    def give_back(self, pages: Pages) -> None:
        self._allocator.give_back(pages)

    def publish(
        self, ids: Ids, pages: Pages, namespace: Namespace, held: Node, priority: int = 0
    ) -> tuple[Node, Pages]:
        """Hands the pages that keep `ids` (whole pages) to the tree and moves the lock from `held` to the last node.

        Returns that node and the tree's pages for `ids`; where these differ from `pages`, the request still owns its
        own and must stop using them before it gives them back.
        """
        node, kept = self._tree.insert(ids, pages, namespace, priority)
        self._tree.lock_node(node)
        self._tree.unlock(held)
        return node, kept

    def flush(self) -> int:
        """Other weights, or as good as: nothing that was cached is matched again. Returns how many pages that freed.

        Pages that running requests have locked are theirs until unlocked, and then go as any others do.
        """
        self.version += 1
        freed = self._tree.evict(self._tree.evictable)
        self._allocator.give_back(freed)
        return freed.size

    def nodes(self) -> Iterator[Node]:
        """The tree's nodes, for checks."""
        return self._tree.nodes()

    def check_idle(self) -> None:
        """Raises AssertionError unless every page is free or cached, and no request holds any."""
        free, tree = self._allocator.free_pages, self._tree
        owned = [page for node in tree.nodes() for page in node.pages.tolist()]
        problem = (
            f"free {free} + evictable {tree.evictable} + protected {tree.protected} of {self.total_pages} pages, "
            f"{len(owned)} in the tree"
        )
        assert tree.protected == 0 and free + tree.evictable == self.total_pages, problem
        assert len(owned) == len(set(owned)) == tree.evictable, problem
