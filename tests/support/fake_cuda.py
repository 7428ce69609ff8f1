"""Streams, events and pinned memory without a GPU, as late as CUDA may be: what was not waited for has not happened.

Model operations run at once, in the compute stream's order. Copies in other streams run when somebody may rely on them:
when the compute stream waits for their event, or when the host is told that the event has fired.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from gapless.kernels.batched import BatchedOps
from gapless.overlap.cuda import CUDADevice
from gapless.overlap.cuda_pipeline import Pipeline
from gapless.overlap.cuda_steps import CUDASteps
from gapless.runtime.core.config import ServerConfig
from gapless.runtime.core.plan import Plan

POISON = -1234567


class FakeEvent:
    """Not recorded, recorded, or fired. `polls_left` is how often the host is told "not yet"."""

    def __init__(self, streams: FakeStreams) -> None:
        self.streams = streams
        self.stream: FakeStream | None = None
        self.position = 0
        self.polls_left = streams.polls
        self.at = 0.0

    def query(self) -> bool:
        assert self.stream is not None, "an event was asked for before it was recorded: CUDA would say yes"
        self.polls_left -= 1
        if self.polls_left >= 0:
            return False
        self.stream.run_to(self.position)
        self.streams.log.append(("fired", self))
        return True

    def elapsed_time(self, end: FakeEvent) -> float:
        return 1000 * (end.at - self.at)


class FakeStream:
    """Work that is to be done, in order. The compute stream waits for others as soon as it is told to."""

    def __init__(self, streams: FakeStreams, name: str) -> None:
        self.streams, self.name = streams, name
        self.work: list[Callable[[], None]] = []
        self.done = 0
        self.newest: FakeEvent | None = None  # that was recorded here
        self.awaited: list[FakeEvent] = []

    def record_event(self, event: FakeEvent) -> FakeEvent:
        assert event.stream is None, "an event was recorded twice"
        event.stream, event.position = self, len(self.work)
        event.at = time.perf_counter()
        self.newest = event
        self.streams.log.append((f"record {self.name}", event))
        return event

    def wait_event(self, event: FakeEvent) -> None:
        assert event.stream is not None, (
            "a stream waits for an event before it was recorded: CUDA would not wait"
        )
        self.streams.log.append((f"wait {self.name}", event))
        self.awaited.append(event)
        self.add(lambda: event.stream.run_to(event.position))

    def add(self, work: Callable[[], None]) -> None:
        self.work.append(work)
        if self.name == "compute":
            self.run_to(len(self.work))

    def run_to(self, position: int) -> None:
        while self.done < position:
            self.done += 1
            self.work[self.done - 1]()


class FakeStreams:
    """Implements `cuda_streams.Streams`; `log` has what was done, in the order of the host."""

    def __init__(self, polls: int = 0) -> None:
        self.polls = polls
        self.log: list[tuple[str, Any]] = []
        self.current: FakeStream | None = None
        self.streams: list[FakeStream] = []
        self.buffers: list[Tensor] = []

    def stream(self) -> FakeStream:
        self.streams.append(FakeStream(self, ("inputs", "compute", "results")[len(self.streams)]))
        return self.streams[-1]

    def event(self) -> FakeEvent:
        return FakeEvent(self)

    @contextmanager
    def use(self, stream: FakeStream) -> Iterator[None]:
        before, self.current = self.current, stream
        with nullcontext() if stream.name == "compute" else Delayed(stream):
            yield
        self.current = before

    def pinned(self, count: int, dtype: torch.dtype) -> Tensor:
        self.buffers.append(torch.full((count,), POISON, dtype=dtype))
        return self.buffers[-1]

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Keeps the device's tensor alive no longer than its owner does: it is gone where nobody holds it."""
        assert self.current is not None and self.current.name != "compute"
        self.log.append((f"copy {self.current.name}", target))
        if target.is_meta or source.is_meta:
            return
        if self.current.name == "inputs":
            target.fill_(POISON)
            self.current.add(lambda: void(target.copy_(source)))
            return
        compute = self.streams[1]
        assert compute.newest in self.current.awaited, "ids were copied without a wait for what computes them"
        held = weakref.ref(source)

        def bring() -> None:
            tensor = held()
            assert tensor is not None, "sampled ids were freed before they were copied"
            target.copy_(tensor)

        target.fill_(POISON)
        self.current.add(bring)


class Delayed(TorchDispatchMode):
    """torch's own copies in a stream: done when the stream comes to them, their targets poisoned until then."""

    def __init__(self, stream: FakeStream) -> None:
        super().__init__()
        self.stream = stream

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.ops.aten.copy_.default:
            return func(*args, **(kwargs or {}))
        self.stream.add(lambda: void(func(*args)))
        return args[0].fill_(POISON)


def void(_: object) -> None:
    return


class Steps(CUDASteps):
    """CUDASteps on another device of torch's."""

    kind = "cpu"

    def __init__(self, config: ServerConfig) -> None:
        super().__init__(config, wrap_ops=lambda ops: BatchedOps())
        self.log: list[tuple[str, Any]] = []

    def _open(self) -> torch.device:
        return torch.device(self.kind)

    def _choose_dtype(self, asked: str) -> tuple[torch.dtype, str]:
        return torch.float32, "float32"

    def _describe(self) -> str:
        return f"{self.kind} in place of CUDA"

    def _rates(self, pool: Tensor) -> None:
        return None

    def _host_memory(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.full(tuple(shape), POISON, dtype=dtype, device=self.kind)

    def tokens(self, plan: Plan, fields: Any) -> Tensor | None:
        self.log.append(("forward", plan.step))
        return super().tokens(plan, fields)


def fake_device(
    config: ServerConfig, streams: FakeStreams, steps: Steps | None = None, depth: int = 0
) -> CUDADevice:
    """`depth` is the number of launches that may be in flight; 0: as many as the loop has."""
    depth = depth or (1 if config.disable_overlap_schedule else 2) * config.num_scheduler_steps
    return CUDADevice(lambda depth: Pipeline(steps or Steps(config), lambda: streams, depth), depth)
