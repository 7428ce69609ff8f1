"""Carries out the page copies of plans: within the device's pool, and between it and host memory.

Host memory holds pages that a preempted request will want again (as vLLM's swap space does: Kwon et al., "Efficient
Memory Management for Large Language Model Serving with PagedAttention", 2023, section 4.5).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import numpy as np

from gapless.runtime.core.config import ServerConfig
from gapless.runtime.core.errors import ConfigError
from gapless.runtime.core.plan import Copy

if TYPE_CHECKING:
    from torch import Tensor

_GIB = 1 << 30


def host_pages(config: ServerConfig, page_bytes: int, most: int) -> int:
    """How many pages of host memory there are: as --swap-space says, but at most `most`; 0 where nothing is swapped.

    Raises ConfigError naming --swap-space where that is less than a page.
    """
    if config.preemption == "recompute":
        return 0
    pages = int(min(config.swap_space * _GIB / page_bytes, most))
    if pages < 1:
        raise ConfigError(
            f"--swap-space {config.swap_space} GiB holds less than one KV page of {page_bytes} bytes, "
            f"which --preemption {config.preemption} needs",
            param="swap_space",
        )
    return pages


def copy_in_stream(target: Tensor, source: Tensor) -> None:
    """Enqueues the copy in the stream in use and does not wait for it, if what lies in host memory is pinned.

    torch brings together what is not contiguous first, on the device, in memory that belongs to that stream.
    """
    target.copy_(source, non_blocking=True)


def copy_on_cpu(target: Tensor, source: Tensor) -> None:
    """Copies on this thread alone.

    For a page torch's team of threads is no faster, and where another process has one of its cores, each copy waits for
    that core.
    """
    import torch

    np.copyto(target.view(torch.uint8).numpy(), source.view(torch.uint8).numpy())


class PagePools:
    """The pages of a device and those of host memory."""

    def __init__(self, device: Tensor, host: Tensor | None, copy: Callable[[Tensor, Tensor], None]) -> None:
        """`device` is [layers, 2, pages, page_size, Hkv, D]; `host` is [pages, layers, 2, page_size, Hkv, D].

        There is no host page 0: page p is host[p - 1]. `copy` copies a page, [layers, 2, page_size, Hkv, D].
        """
        self.device = device
        self._host, self._copy = host, copy

    @property
    def host_pages(self) -> int:
        return 0 if self._host is None else len(self._host)

    def carry_out(self, copies: Iterable[Copy]) -> None:
        """In this order."""
        for copy in copies:
            for source, target in zip(copy.source.tolist(), copy.target.tolist(), strict=True):
                self._copy(self._page(target, copy.kind == "out"), self._page(source, copy.kind == "in"))

    def _page(self, page: int, on_host: bool) -> Tensor:
        if not on_host:
            return self.device[:, :, page]
        assert self._host is not None and page > 0, f"there is no host page {page}"
        return self._host[page - 1]
