"""What the scheduler keeps of one request beside its row."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from gapless.radix_cache.namespace import Namespace
from gapless.radix_cache.tree import Node
from gapless.runtime.core.messages import Submit, int32s
from gapless.runtime.scheduler.grammar import Grammar


@dataclass(eq=False)
class Request:
    submit: Submit
    arrival: int  # order of coming, for fairness and for the choice of victims
    max_output: int  # max_new_tokens, or less where the context or the pool ends before
    slot: int = 0  # 0 while it waits for the first time; a preempted one keeps its slot
    generation: int = 0  # of the slot
    cached_tokens: int = 0  # of the prompt, at its first start
    grammar: Grammar | None = None
    locked: Node | None = None  # the end of its path in the tree, while it holds pages
    tree_pages: int = 0  # its leading pages that the tree owns
    preemptions: int = 0
    prompt: NDArray[np.int32] = field(init=False)

    def __post_init__(self) -> None:
        self.prompt = int32s(self.submit.input_ids)

    @property
    def priority(self) -> int:
        return self.submit.priority

    @property
    def namespace(self) -> Namespace:
        return Namespace(self.submit.extra_key, self.submit.cache_salt)
