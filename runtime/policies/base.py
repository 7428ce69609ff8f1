"""What a queue order sees of a waiting request, and the orders by name."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from gapless.runtime.policies import fcfs, lpm

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from gapless.radix_cache.cache import PrefixCache


class Waiting(Protocol):
    prompt: NDArray[np.int32]
    arrival: int

    @property
    def namespace(self) -> tuple[str, ...]: ...


W = TypeVar("W", bound=Waiting)
# Takes the waiting requests by arrival, the cache, and how many can be tried; gives so many in the order of trying.
Order = Callable[[Collection[Any], "PrefixCache", int], list[Any]]
ORDERS: dict[str, Order] = {"fcfs": fcfs.order, "lpm": lpm.order}
