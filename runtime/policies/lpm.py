"""Longest cached prefix first (SGLang's lpm, Zheng et al. 2024): the order that keeps shared prefixes in the cache.

Above MATCH_LIMIT waiting requests matching each of them costs more than it brings, and the order is that of arrival.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gapless.radix_cache.cache import PrefixCache
    from gapless.runtime.policies.base import Waiting

MATCH_LIMIT = 128


def order(waiting: Sequence[Waiting], cache: PrefixCache) -> list[Waiting]:
    if len(waiting) > MATCH_LIMIT:
        return list(waiting)
    return sorted(waiting, key=lambda request: -len(cache.match(request.prompt, request.namespace).pages))
