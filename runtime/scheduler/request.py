"""What the scheduler keeps of one request beside its row."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from gapless.radix_cache.namespace import Namespace
from gapless.radix_cache.tree import Node
from gapless.runtime.core.messages import Submit, int32s
from gapless.runtime.scheduler.grammar import Grammar
from gapless.runtime.scheduler.groups import Group
from gapless.runtime.scheduler.swap import Swapped


@dataclass(eq=False)
class Request:
    submit: Submit
    arrival: int  # order of coming, for fairness and for the choice of victims
    max_output: int  # max_new_tokens, or less where the context or the pool ends before
    grammar: Grammar | None = None
    leader: Request | None = None  # the first of n samples of the same prompt
    group: Group | None = None
    stamp: int = -1  # the queue's own
    held_on: Request | None = None  # whose prompt it waits for, to share it
    slot: int = 0  # 0 while it waits for the first time; a preempted one keeps its slot
    generation: int = 0  # of the slot
    cached_tokens: int = 0  # of the prompt, at its first start
    space: Namespace = field(default_factory=Namespace)  # where it shares pages, once it has a slot
    has_pages: bool = False
    locked: Node | None = None  # the end of its path in the tree, while it has pages or is swapped out
    tree_pages: int = 0  # its leading pages that the tree owns
    swapped: Swapped | None = None
    preemptions: int = 0
    prompt: NDArray[np.int32] = field(init=False)
    # The first position of the prompt whose token's log probability no launched step finds; the prompt's length: none.
    unscored: int = field(init=False)
    unembedded: bool = field(init=False)  # no launched step finds its embedding, which it asks for

    def __post_init__(self) -> None:
        self.prompt = int32s(self.submit.input_ids)
        self.unembedded = self.submit.embed
        wanted = self.submit.logprobs
        # Nothing comes before the first token, so it has none.
        self.unscored = len(self.prompt) if wanted is None else min(max(wanted.start, 1), len(self.prompt))

    @property
    def shareable(self) -> int:
        """How many of the prompt's tokens may have been computed by others.

        The rest is computed, for there must be logits to sample from, and those that the unscored tokens follow.
        """
        return self.unscored - 1

    @property
    def priority(self) -> int:
        return self.submit.priority

    @property
    def namespace(self) -> Namespace:
        return Namespace(self.submit.extra_key, self.submit.cache_salt)

    def under(self, weights: int) -> Namespace:
        """Its namespace while the weights have that version."""
        return self.namespace._replace(weights=weights)
