"""Longest output first (SGLang's lof): long requests start early, so that a batch of work does not end with a few of
them running alone. Under a steady stream of long ones a short one may wait for ever."""

from __future__ import annotations

from gapless.runtime.policies.base import Waiting
from gapless.runtime.policies.heap import Key


def key(request: Waiting) -> Key:
    return (-request.max_output, request.arrival)
