"""How fast this CPU moves KV pages and computes prompts: measured when the model loads, in some tens of milliseconds.

What a step reaches also depends on the model, on its attention and on who else uses the machine; these rates only have
to tell moving a request's KV from computing it again, which differ by a factor of ten and more.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from gapless.kernels.ops import Ops
from gapless.overlap.page_copies import PagePools, copy_on_cpu
from gapless.runtime.core.plan import Copy

_COPIED_BYTES = 8 << 20  # at least a page
_ROWS, _WIDTH = 64, 1024  # of a product of 0.13 GFLOP
_RUNS = 5  # the first one touches the memory


def page_copy_rate(pool: Tensor) -> float:
    """Bytes/s from a pool of this shape [layers, 2, pages, page_size, Hkv, D] to host memory, page by page."""
    page_bytes = pool[:, :, 0].nbytes
    count = -(-_COPIED_BYTES // page_bytes)
    layers, two, _, *page = pool.shape
    device = torch.zeros((layers, two, count, *page), dtype=pool.dtype)
    host = torch.zeros((count, layers, two, *page), dtype=pool.dtype)
    pages = np.arange(count, dtype=np.int32)
    copies = (Copy("out", pages, pages + 1),)
    pools = PagePools(device, host, copy_on_cpu)
    return count * page_bytes / _best(lambda: pools.carry_out(copies))


def product_rate(ops: Ops, dtype: torch.dtype) -> float:
    """FLOP/s of a linear layer on a prompt's chunk."""
    linear = ops.pack_linear(torch.ones((_WIDTH, _WIDTH), dtype=dtype))
    x = torch.ones((_ROWS, _WIDTH), dtype=dtype)
    return 2 * _ROWS * _WIDTH * _WIDTH / _best(lambda: linear(x))


def _best(run: Callable[[], object]) -> float:
    """Seconds of the fastest of some runs: what the machine does while nobody disturbs it."""
    seconds = []
    for _ in range(_RUNS):
        started = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - started)
    return min(seconds)
