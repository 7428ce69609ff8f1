"""Host memory for the KV of preempted requests, and when it is worth its transfers.

Whether KV is moved or computed again is decided as by vLLM (Kwon et al. 2023, section 4.5), but from numbers: its bytes
over the link, out and in, against the arithmetic of a prefill.
"""

from __future__ import annotations

from dataclasses import dataclass

from gapless.radix_cache.allocator import PageAllocator
from gapless.runtime.core.plan import I32, MoveCosts


@dataclass(frozen=True)
class Swapped:
    """A request's KV on the host: host page i holds what was in its page `first` + i."""

    first: int  # what lies before is in the tree, and locked there
    length: int  # positions with KV, counted from the request's beginning
    pages: I32


class SwapSpace:
    def __init__(self, mode: str, pages: int, costs: MoveCosts | None) -> None:
        """`mode` is --preemption; `costs` decide under `auto`, where None means that swapping is not worth it."""
        self._mode, self._costs = mode, costs
        self._pages = PageAllocator(pages)

    def takes(self, pages: int, begin: int, end: int) -> bool:
        """Whether to move the KV of positions begin .. end - 1, which lies in so many pages, to the host."""
        if not 0 < pages <= self._pages.free_pages or self._mode == "recompute":
            return False
        if self._mode == "swap":
            return True
        return self._costs is not None and swap_seconds(self._costs, end - begin) < compute_seconds(
            self._costs, begin, end
        )

    def take(self, pages: int) -> I32:
        """Host pages, of which there are as many free ones."""
        return self._pages.take(pages)

    def give_back(self, pages: I32) -> None:
        self._pages.give_back(pages)

    @property
    def used_pages(self) -> int:
        return self._pages.total - self._pages.free_pages


def swap_seconds(costs: MoveCosts, tokens: int) -> float:
    """Out and in again."""
    return 2 * tokens * costs.kv_bytes / costs.link


def compute_seconds(costs: MoveCosts, begin: int, end: int) -> float:
    """Prefilling positions begin .. end - 1, each of which attends to itself and all before it."""
    pairs = (end * (end + 1) - begin * (begin + 1)) / 2
    return ((end - begin) * costs.token_flops + pairs * costs.pair_flops) / costs.flops
