"""The orders that the composer uses until it takes its candidates from the queues."""

from __future__ import annotations

from collections.abc import Callable, Collection
from itertools import islice
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gapless.radix_cache.cache import PrefixCache

MATCH_LIMIT = 128


def fcfs(waiting: Collection[Any], cache: PrefixCache, limit: int) -> list[Any]:
    return list(islice(waiting, limit))


def lpm(waiting: Collection[Any], cache: PrefixCache, limit: int) -> list[Any]:
    if len(waiting) > MATCH_LIMIT:
        return fcfs(waiting, cache, limit)
    longest = sorted(waiting, key=lambda request: -len(cache.match(request.prompt, request.namespace).pages))
    return longest[:limit]


# Takes the waiting requests by arrival, the cache, and how many can be tried; gives so many in the order of trying.
Order = Callable[[Collection[Any], "PrefixCache", int], list[Any]]
ORDERS: dict[str, Order] = {"fcfs": fcfs, "lpm": lpm}
