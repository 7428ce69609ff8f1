"""The most urgent first, then by arrival. That those of less priority wait for as long as others come is the point."""

from __future__ import annotations

from gapless.runtime.policies.base import Waiting
from gapless.runtime.policies.heap import Key


def key(request: Waiting) -> Key:
    return (-request.priority, request.arrival)
