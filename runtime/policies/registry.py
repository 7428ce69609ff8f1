"""The queues by the names of --schedule-policy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gapless.runtime.policies import fcfs, lof, priority, random
from gapless.runtime.policies.base import Prefixes, Queue, W
from gapless.runtime.policies.dfs_weight import HeaviestBranch
from gapless.runtime.policies.keyed import KeyedQueue
from gapless.runtime.policies.lpm import LongestPrefix

QUEUES: dict[str, Callable[[Prefixes[Any], int], Queue[Any]]] = {
    "lpm": lambda prefixes, seed: LongestPrefix(prefixes),
    "dfs-weight": lambda prefixes, seed: HeaviestBranch(),
    "fcfs": lambda prefixes, seed: KeyedQueue(fcfs.key),
    "lof": lambda prefixes, seed: KeyedQueue(lof.key),
    "random": lambda prefixes, seed: KeyedQueue(random.key(seed)),
    "priority": lambda prefixes, seed: KeyedQueue(priority.key),
}


def make_queue(name: str, prefixes: Prefixes[W], seed: int) -> Queue[W]:
    """An empty queue. `prefixes` is asked by lpm alone, `seed` is used by random alone; KeyError for another name."""
    return QUEUES[name](prefixes, seed)
