"""First come, first served."""

from __future__ import annotations

from collections.abc import Collection
from itertools import islice
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gapless.radix_cache.cache import PrefixCache
    from gapless.runtime.policies.base import W


def order(waiting: Collection[W], cache: PrefixCache, limit: int) -> list[W]:
    return list(islice(waiting, limit))
