"""First come, first served."""

from __future__ import annotations

from gapless.runtime.policies.base import Waiting
from gapless.runtime.policies.heap import Key


def key(request: Waiting) -> Key:
    return (request.arrival,)
