"""The queue of waiting requests: what a policy sees of a request and of the cache, and what it offers.

A queue never looks at all that wait: each call costs a constant or O(log n), so that thousands of waiting requests
do not slow a step. `registry` has the queues by name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, TypeVar

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from gapless.radix_cache.namespace import Namespace


class Waiting(Protocol):
    """A request as a queue sees it: hashed by identity, and ranked by what these fields say when it is pushed."""

    prompt: NDArray[np.int32]
    arrival: int  # order of coming, from 1; no two have the same
    max_output: int  # tokens
    stamp: int  # the queue's own mark of when it was first pushed; -1 before that

    @property
    def priority(self) -> int:
        """More is more urgent."""
        ...

    @property
    def namespace(self) -> Namespace: ...


W = TypeVar("W", bound=Waiting)
W_contra = TypeVar("W_contra", bound=Waiting, contravariant=True)


class Prefixes(Protocol[W_contra]):
    """What the cache knows of waiting requests."""

    @property
    def changes(self) -> int:
        """Grows whenever a request may have come to have more of its prompt cached than before."""
        ...

    def cached_tokens(self, request: W_contra) -> int:
        """Prompt tokens that are cached now. Costs microseconds: ask for few requests a step."""
        ...


class Queue(Protocol[W]):
    """The waiting requests in the order of a policy."""

    def push(self, request: W) -> None:
        """The request waits from now on; also for one that was removed and comes back."""
        ...

    def remove(self, request: W, *, admitted: bool) -> None:
        """The request waits no more: it runs (`admitted`), was aborted, or is held back for a while."""
        ...

    def first(self) -> W | None:
        """The request to try next, which stays in the queue."""
        ...

    def turn(self) -> None:
        """Called once a step, for bounded upkeep."""
        ...

    def __len__(self) -> int: ...
