"""Which choice continues a prompt best, from the log probabilities of the choices' tokens.

A prompt and a choice are tokenized together, since a token may span the border between them. What is scored is what
follows the tokens that all choices share, so it depends on the whole texts alone: a space that moves from the choices
to the end of the prompt changes nothing.

The methods are SGLang's (python/sglang/lang/choices.py has their names and what they compute).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from gapless.frontend.backends.base import BackendError, Selected

Token = TypeVar("Token", int, str)


@dataclass(frozen=True, slots=True)
class Tail:
    """The tokens of a choice that are scored, at least one, as ids or as whatever tells them apart.

    `unconditional` are their log probabilities without the prompt, where a method needs them: 0 for the first, which
    follows nothing.
    """

    tokens: tuple[int | str, ...]
    logprobs: tuple[float, ...]
    unconditional: tuple[float, ...] = ()


def shared_tokens(texts: Sequence[list[Token]]) -> int:
    """How many tokens of tokenized prompts with choices are not scored: all that they share, but one of the shortest
    is always left. 0: there is nothing before the choices."""
    first, last = min(texts), max(texts)  # of sorted ones, these two share the least
    differ = (i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b)
    return max(min(next(differ, len(first)), min(map(len, texts)) - 1), 0)


def _token_length_normalized(tails: Sequence[Tail]) -> list[float]:
    """The mean over a choice's tokens, so that a long choice is not the less likely one for its length."""
    return [_mean(tail.logprobs) for tail in tails]


def _unconditional_likelihood_normalized(tails: Sequence[Tail]) -> list[float]:
    """The mean of what the prompt adds to each token's log probability, so that common words have no advantage."""
    return [
        -math.inf
        if -math.inf in tail.logprobs
        else _mean([given - alone for given, alone in zip(tail.logprobs, tail.unconditional, strict=True)])
        for tail in tails
    ]


def _greedy_token_selection(tails: Sequence[Tail]) -> list[float]:
    """For how many steps a choice is what greedy decoding would write, could it write nothing but the choices.

    Nothing says how likely it is that a choice ends where another goes on: the mean of its tokens stands for that.
    """
    steps = [0] * len(tails)
    left = list(range(len(tails)))
    place = 0
    while True:
        best: dict[int | str | None, float] = {}  # None: the end
        nexts = {i: tails[i].tokens[place] if place < len(tails[i].tokens) else None for i in left}
        for i, token in nexts.items():
            value = _mean(tails[i].logprobs) if token is None else tails[i].logprobs[place]
            best[token] = max(best.get(token, -math.inf), value)
        taken = max(best, key=best.__getitem__)
        left = [i for i in left if nexts[i] == taken]
        for i in left:
            steps[i] += 1
        if taken is None or len(left) == 1:
            return [float(count) for count in steps]
        place += 1


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


token_length_normalized = "token_length_normalized"
greedy_token_selection = "greedy_token_selection"
unconditional_likelihood_normalized = "unconditional_likelihood_normalized"

METHODS: Mapping[str, Callable[[Sequence[Tail]], list[float]]] = {
    token_length_normalized: _token_length_normalized,
    greedy_token_selection: _greedy_token_selection,
    unconditional_likelihood_normalized: _unconditional_likelihood_normalized,
}


def check_choices(choices: Sequence[str], method: str) -> None:
    """Raises BackendError where there are none, or no such method."""
    if method not in METHODS:
        raise BackendError(f"choices_method is {method!r}: must be one of {', '.join(METHODS)}")
    if not choices:
        raise BackendError("select needs choices")


def nothing_before() -> BackendError:
    return BackendError("select needs text before the choices: there is nothing to judge them by")


def selected(choices: Sequence[str], tails: Sequence[Tail], method: str, meta: Mapping[str, Any]) -> Selected:
    """The best by `method`, the first of equals; `tails` are the choices'."""
    scores = METHODS[method](tails)
    index = max(range(len(scores)), key=scores.__getitem__)
    means = [_mean(tail.logprobs) for tail in tails]
    return Selected(index, choices[index], tuple(scores), {**meta, "normalized_prompt_logprobs": means})
