"""The pages of the KV pool that nobody owns."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Pages = NDArray[np.int32]


class PageAllocator:
    """A stack of free pages. Taking and returning cost what is asked for, whatever the pool's size.

    Page 0 is never handed out: padding rows write there. The newest freed pages are taken first, so that a lightly used
    pool touches little memory.
    """

    def __init__(self, pages: int) -> None:
        """`pages` counts the usable ones, numbered 1..pages."""
        self.total = pages
        self._stack: Pages = np.arange(pages, 0, -1, dtype=np.int32)
        self._free = pages
        self._is_free = np.ones(pages + 1, dtype=bool)  # page 0 is refused like a free one
        self._place = np.zeros(pages + 1, np.int32)  # scratch: where a page stands in what is given back

    @property
    def free_pages(self) -> int:
        return self._free

    def take(self, count: int) -> Pages:
        """`count` pages; the caller has made sure that there are as many."""
        assert count <= self._free, f"asked for {count} pages of {self._free} free ones"
        self._free -= count
        pages = self._stack[self._free : self._free + count][::-1].copy()
        self._is_free[pages] = False
        return pages

    def give_back(self, pages: Pages) -> None:
        """Raises ValueError for a page that is free already, unknown, or named twice."""
        count = pages.size
        if not count:
            return
        try:
            known = pages.view(np.uint32)  # so that a negative number is out of range
            refused = int(np.count_nonzero(self._is_free[known]))
        except IndexError:
            refused = count
        if refused:
            raise ValueError(f"pages {pages[:8].tolist()}... are free already or not of this pool")
        order = np.arange(count, dtype=np.int32)
        self._place[pages] = order
        if np.count_nonzero(self._place[pages] != order):
            raise ValueError(f"a page is named twice in {pages[:8].tolist()}...")
        self._is_free[pages] = True
        self._stack[self._free : self._free + pages.size] = pages
        self._free += pages.size
