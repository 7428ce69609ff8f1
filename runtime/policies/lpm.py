"""Longest cached prefix first (SGLang's lpm, Zheng et al. 2024): the order that keeps shared prefixes in the cache.

Above MATCH_LIMIT waiting requests matching each of them costs more than it brings, and the order is that of arrival.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from gapless.runtime.policies import fcfs

if TYPE_CHECKING:
    from gapless.radix_cache.cache import PrefixCache
    from gapless.runtime.policies.base import W

MATCH_LIMIT = 128


def order(waiting: Collection[W], cache: PrefixCache, limit: int) -> list[W]:
    if len(waiting) > MATCH_LIMIT:
        return fcfs.order(waiting, cache, limit)
    longest = sorted(waiting, key=lambda request: -len(cache.match(request.prompt, request.namespace).pages))
    return longest[:limit]
