"""How much of a load's prompts a cache that was empty at its start can have had."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from gapless.radix_cache.namespace import Namespace
from gapless.radix_cache.tree import RadixTree


def explained_tokens(requests: Iterable[tuple[Sequence[int], Sequence[int]]]) -> int:
    """Prompt tokens that stand in the prompts and answers before them; `requests` are (prompt, answer), in order.

    No server finds more in its cache, unless something was there before.
    """
    tree, space, found = RadixTree(1), Namespace(), 0
    for prompt, answer in requests:
        ids = np.array([*prompt, *answer], np.int32)
        found += tree.match(ids[: len(prompt)], space).length
        tree.insert(ids, np.zeros(len(ids), np.int32), space)
    return found
