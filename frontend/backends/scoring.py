"""The requests that score choices by /generate's fields: one for what they share, then one for all of them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from gapless.frontend.backends.base import Selected
from gapless.frontend.backends.select import (
    Tail,
    check_choices,
    nothing_before,
    selected,
    shared_tokens,
    unconditional_likelihood_normalized,
)

Fields = Mapping[str, Any]
Call = Callable[[Fields], Awaitable[Any]]  # a request of these fields: its answer
Tokenize = Callable[[Sequence[str]], Awaitable[list[list[int]] | None]]  # None: the server does not do that
Row = list[Any]  # (log probability, id, text) of each token of a prompt from some place on

_BACK = 3  # tokens of the prompt that are scored, where nothing says which one a choice begins with
_COUNTS = ("prompt_tokens", "completion_tokens", "cached_tokens")
_NO_OUTPUT: Fields = {"sampling_params": {"max_new_tokens": 0}}


async def select(
    call: Call, tokenize: Tokenize, text: str, choices: Sequence[str], method: str, group: Fields
) -> Selected:
    """The choice that continues `text` best; a single one is not scored. `group` are fields to send with each request.

    Raises BackendError where the method is unknown, or where nothing comes before the choices.
    """
    check_choices(choices, method)
    if len(choices) == 1:
        return Selected(0, choices[0], (0.0,))

    async def ask(fields: Fields) -> Any:
        return await call({**fields, **_NO_OUTPUT, **group})

    texts = [text + choice for choice in choices]
    ids = await tokenize(texts)
    answers, rows = await (_rows_of_texts(ask, text, texts) if ids is None else _rows(ask, ids))
    tails = [Tail(tuple(entry[1] for entry in row), tuple(map(_logprob, row))) for row in rows]
    if method == unconditional_likelihood_normalized:
        tails = await _with_unconditional(ask, tails)
    meta = {name: sum(answer["meta_info"].get(name, 0) for answer in answers) for name in _COUNTS}
    return selected(choices, tails, method, meta | {"input_token_logprobs": rows})


async def _rows(ask: Call, ids: list[list[int]]) -> tuple[list[Any], list[Row]]:
    """(answers, the entries of each choice's tail) for prompts with choices."""
    start = shared_tokens(ids)
    if not start:
        raise nothing_before()
    await ask({"input_ids": ids[0][:start]})
    # From one token earlier: where log probabilities start, SGLang's server has none.
    answers = await ask({"input_ids": ids, **_logprobs_from(start - 1)})
    return answers, [
        _entries(answer)[start - len(prompt) :] for answer, prompt in zip(answers, ids, strict=True)
    ]


async def _rows_of_texts(ask: Call, text: str, texts: Sequence[str]) -> tuple[list[Any], list[Row]]:
    """The same where only the server knows the tokens: it is asked for those at the prompt's end, and for more where
    the choices do not share the first of them."""
    if not text:
        raise nothing_before()
    prompt_tokens = (await ask({"text": text}))["meta_info"]["prompt_tokens"]
    back = _BACK
    while True:
        first = max(prompt_tokens - back, 0)
        answers = await ask({"text": texts, **_logprobs_from(first)})
        rows = [_entries(answer) for answer in answers]
        if start := shared_tokens([[entry[1] for entry in row] for row in rows]):
            return answers, [row[start:] for row in rows]
        if not first:
            raise nothing_before()
        back *= 4


async def _with_unconditional(ask: Call, tails: Sequence[Tail]) -> list[Tail]:
    """Each tail as a prompt of its own. Nothing comes before its first token, which counts as 0."""
    longer = [list(tail.tokens) for tail in tails if len(tail.tokens) > 1]
    answers = await ask({"input_ids": longer, **_logprobs_from(0)}) if longer else []
    found = iter([tuple(map(_logprob, _entries(answer)[1:])) for answer in answers])
    return [
        dataclasses.replace(tail, unconditional=(0.0, *(next(found) if len(tail.tokens) > 1 else ())))
        for tail in tails
    ]


def _logprobs_from(start: int) -> Fields:
    return {"return_logprob": True, "logprob_start_len": start}


def _entries(answer: Any) -> Row:
    entries: Row = answer["meta_info"]["input_token_logprobs"]
    return entries


def _logprob(entry: Any) -> float:
    """JSON has no infinity: what cannot be has null."""
    return -math.inf if entry[0] is None else float(entry[0])
