"""The pages of the KV pool that nobody owns."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Pages = NDArray[np.int32]
_TAKEN = np.int32(-1).tobytes()


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
        self._order = np.arange(pages, dtype=np.int32)
        self._mark = np.zeros(pages + 1, np.int32)  # -1: taken; page 0 is refused like a free one

    @property
    def free_pages(self) -> int:
        return self._free

    def take(self, count: int) -> Pages:
        """`count` pages, int32; the caller has made sure that there are as many."""
        assert 0 <= count <= self._free, f"asked for {count} pages of {self._free} free ones"
        self._free -= count
        pages = self._stack[self._free : self._free + count][::-1].copy()
        self._mark[pages] = -1
        return pages

    def give_back(self, pages: Pages) -> None:
        """Raises ValueError, and changes nothing, for a page that is free already, unknown, or named twice."""
        count = pages.size
        if not count:
            return
        index = pages.view(np.uint32).astype(np.intp)  # a negative number becomes one beyond the pool
        try:
            taken = self._mark.take(index).tobytes() == _TAKEN * count
        except IndexError:
            taken = False
        if not taken:
            raise ValueError(f"pages {pages[:8].tolist()}... are free already or not of this pool")
        order = self._order[:count]
        self._mark[index] = order  # of a page named twice only the last place stays
        if self._mark.take(index).tobytes() != order.tobytes():
            self._mark[index] = -1
            raise ValueError(f"a page is named twice in {pages[:8].tolist()}...")
        self._stack[self._free : self._free + count] = pages
        self._free += count
