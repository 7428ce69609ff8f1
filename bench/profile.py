"""Where a step's time goes, and what the matrix products alone would allow.

The model runs here in one thread, without overlap, so that the shares add up: what is not in a kernel or the scheduler
is `other` (embedding, gathers, the calls between kernels). The engine hides the scheduler's share behind the device.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from gapless.overlap.torch_worker import TorchWorker
from gapless.runtime.core.config import ServerConfig
from gapless.runtime.core.messages import Submit, column
from gapless.runtime.core.sampling import SamplingParams
from gapless.runtime.scheduler.scheduler import Scheduler

if TYPE_CHECKING:
    from torch import Tensor

    from gapless.kernels.ops import Linear, Ops

_CATEGORY = {
    "rms_norm": "elementwise",
    "add_rms_norm": "elementwise",
    "rope_and_store": "elementwise",
    "gated": "elementwise",
    "attention": "attention",
    "argmax": "sampling",
}
CHUNK = 512  # rows of a product while prompts are computed


class TimedOps:
    """An `Ops` that adds up the seconds of each category and keeps the packed products."""

    def __init__(self, inner: Ops) -> None:
        self.name = inner.name
        self.seconds: dict[str, float] = defaultdict(float)
        self.linears: list[
            tuple[tuple[int, int], Linear]
        ] = []  # (out, in) and the product, in the order of loading
        self._inner = inner
        for name, category in _CATEGORY.items():
            setattr(self, name, self._timed(getattr(inner, name), category))

    def pack_linear(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        shape = (weight.shape[0], weight.shape[1])
        linear = self._inner.pack_linear(weight, bias)
        self.linears.append((shape, linear))
        return self._timed(linear, "products")

    def _timed(self, function: Callable[..., Any], category: str) -> Callable[..., Any]:
        def run(*arguments: Any, **named: Any) -> Any:
            started = time.perf_counter()
            result = function(*arguments, **named)
            self.seconds[category] += time.perf_counter() - started
            return result

        return run


class Profiler:
    """One loaded model; made and used in one thread."""

    def __init__(self, config: ServerConfig) -> None:
        self.config = config
        self.worker = TorchWorker(config, wrap_ops=self._wrap)
        self.info = self.worker.load()

    def _wrap(self, ops: Ops) -> Ops:
        self.ops = TimedOps(ops)
        return self.ops  # type: ignore[return-value]  # its methods are set by name

    def product_seconds(self, rows: int, repeats: int) -> tuple[float, float]:
        """Median seconds of the products of all layers, and of the head, for `rows` rows."""
        import torch

        dtype = getattr(torch, self.info.dtype)
        body, (head_shape, head) = self.ops.linears[:-1], self.ops.linears[-1]
        inputs = {size: torch.randn(rows, size).to(dtype) for (_, size), _ in self.ops.linears}
        bodies, heads = [], []
        for _ in range(repeats):
            started = time.perf_counter()
            for (_, size), linear in body:
                linear(inputs[size])
            between = time.perf_counter()
            head(inputs[head_shape[1]])
            bodies.append(between - started)
            heads.append(time.perf_counter() - between)
        return statistics.median(bodies), statistics.median(heads)

    def breakdown(self, prompts: Sequence[Sequence[int]], output_len: int) -> dict[str, float]:
        """Runs the workload, greedy, without overlap; the share of each category in the time, summing to 1."""
        scheduler = Scheduler(self.config, self.info)
        params = SamplingParams(max_new_tokens=output_len, temperature=0.0, ignore_eos=True)
        scheduler.handle(
            Submit(uid, column(prompt, "<i4"), params, (), seed=0) for uid, prompt in enumerate(prompts, 1)
        )
        self.ops.seconds.clear()
        host = device = 0.0
        begun = time.perf_counter()
        while not scheduler.is_idle:
            plan = scheduler.compose()
            assert plan is not None, "there is work but no step"
            started = time.perf_counter()
            late_ids, ids = self.worker.sample_late(plan), self.worker.run(plan)
            device += time.perf_counter() - started
            scheduler.retire(plan, ids, late_ids)
            scheduler.take_output()
        total = time.perf_counter() - begun
        host = total - device
        shares = {name: seconds / total for name, seconds in self.ops.seconds.items()}
        shares["host"] = host / total
        shares["other"] = 1 - sum(shares.values())
        return shares
