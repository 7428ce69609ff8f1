"""What a queue order sees of a waiting request, and the orders by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

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


# Takes the waiting requests by arrival and the cache; gives the order in which they are tried.
Order = Callable[[Sequence[Any], "PrefixCache"], list[Any]]
ORDERS: dict[str, Order] = {"fcfs": fcfs.order, "lpm": lpm.order}
