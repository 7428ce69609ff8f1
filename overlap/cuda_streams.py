"""The little of CUDA that a launch needs beside torch's operations, small enough for a test to stand in for it."""

from __future__ import annotations

import ctypes
import importlib.util
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from gapless.runtime.core.errors import ConfigError

if TYPE_CHECKING:
    import torch
    from torch import Tensor


class Event(Protocol):
    def query(self) -> bool:
        """True once the stream has come to where the event was recorded."""
        ...

    def elapsed_time(self, end: Any) -> float:
        """Milliseconds from this event to a later one; both have fired."""
        ...


class Stream(Protocol):
    def record_event(self, event: Any) -> Any:
        """The event will fire when the stream has come to this point."""
        ...

    def wait_event(self, event: Any) -> None:
        """What comes after this in the stream runs once the event has fired; the caller does not wait."""
        ...


class Streams(Protocol):
    def stream(self) -> Stream: ...

    def event(self) -> Event: ...

    def use(self, stream: Any) -> AbstractContextManager[Any]:
        """Inside, the calling thread's operations and its allocations belong to `stream`."""
        ...

    def pinned(self, count: int, dtype: torch.dtype) -> Tensor:
        """[count] in host memory that the device copies from and to on its own."""
        ...

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Between pinned memory and the device, in the stream in use; both must stay as they are until it is done."""
        ...


class TorchStreams:
    """Implements Streams on torch's current CUDA device; raises ConfigError where there is none."""

    def __init__(self) -> None:
        import torch

        if not torch.cuda.is_available():
            raise ConfigError("--device cuda: torch finds no CUDA device", param="device")

    def stream(self) -> Stream:
        import torch

        return torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def event(self) -> Event:
        import torch

        return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]

    def use(self, stream: Any) -> AbstractContextManager[Any]:
        import torch

        return torch.cuda.stream(stream)

    def pinned(self, count: int, dtype: torch.dtype) -> Tensor:
        import torch

        return torch.empty(count, dtype=dtype, pin_memory=True)

    def copy(self, target: Tensor, source: Tensor) -> None:
        target.copy_(source, non_blocking=True)


def cuda_is_there() -> bool:
    """Whether the driver has a device and torch was built for CUDA; asked without importing torch."""
    torch = importlib.util.find_spec("torch")
    if torch is None or torch.origin is None:
        return False
    if not (Path(torch.origin).parent / "lib" / "libtorch_cuda.so").exists():
        return False
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    count = ctypes.c_int(0)
    return driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(count)) == 0 and count.value > 0
