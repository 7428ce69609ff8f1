"""Stand-ins for what a queue sees: requests, and a cache that says what it is told to."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from gapless.radix_cache.namespace import Namespace

_NO_NAMESPACE = Namespace()


@dataclass(eq=False)
class Request:
    arrival: int
    tokens: tuple[int, ...] = (1,)
    max_output: int = 1
    priority: int = 0
    namespace: Namespace = _NO_NAMESPACE
    stamp: int = -1
    prompt: NDArray[np.int32] = field(init=False)

    def __post_init__(self) -> None:
        self.prompt = np.array(self.tokens, np.int32)


class Cache:
    """`cached` says how many tokens are; `answers` has what was last said of a request, `asked` how often in all."""

    def __init__(self) -> None:
        self.changes = 0
        self.cached: dict[Request, int] = {}
        self.answers: dict[Request, int] = {}
        self.asked = 0

    def cached_tokens(self, request: Request) -> int:
        self.asked += 1
        self.answers[request] = self.cached.get(request, 0)
        return self.answers[request]

    def change(self, request: Request, tokens: int) -> None:
        self.cached[request] = tokens
        self.changes += 1
