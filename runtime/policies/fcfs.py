"""First come, first served."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gapless.radix_cache.cache import PrefixCache
    from gapless.runtime.policies.base import Waiting


def order(waiting: Iterable[Waiting], cache: PrefixCache) -> list[Waiting]:
    return list(waiting)
