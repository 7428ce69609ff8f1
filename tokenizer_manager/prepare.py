"""From a checked prompt to what the scheduler takes; shared by the HTTP process and the offline engine."""

from __future__ import annotations

import reprlib
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from gapless.runtime.core.errors import RequestError
from gapless.runtime.core.logprobs import LogprobParams
from gapless.runtime.core.messages import Ready, Submit
from gapless.runtime.core.random import mix
from gapless.runtime.core.sampling import GRAMMARS
from gapless.runtime.tokenizer.base import Tokenizer
from gapless.tokenizer_manager.schema import Prompt

_SURELY_SHORT = 8192  # characters, too few to be worth a look at the vocabulary


def prepare(
    prompt: Prompt,
    samples: Sequence[tuple[int, int]],
    tokenizer: Tokenizer,
    ready: Ready,
    grammar: str = "",
) -> list[Submit]:
    """Tokenizes and fits `prompt`, once for all its `samples`: (uid, seed where the prompt brings none) of each.

    `grammar` is what the output must match, in Lark.

    Raises RequestError where an id is outside the embedding table, or the prompt is empty or too long. It holds the
    GIL for a fraction of the time that tokenizing takes: call it in a thread where the text is long.
    """
    params = prompt.params
    for i, token_id in enumerate(params.stop_token_ids):
        _check_id(token_id, f"{prompt.params_field}.stop_token_ids[{i}]", ready.vocab_size)
    for token_id in params.logit_bias:
        _check_id(token_id, f"{prompt.params_field}.logit_bias[{token_id}]", ready.vocab_size)
    ids = (
        prompt.input_ids if prompt.text is None else tokenizer.encode(prompt.text, prompt.add_special_tokens)
    )
    assert ids is not None
    _check_length(len(ids), "tokens", _longest(ready), prompt.field, ready)
    _check_ids(ids, prompt.field, ready)
    logprobs = _logprobs(prompt.logprobs, len(ids), ready)
    fitting = ready.context_length - len(ids)
    eos = frozenset() if params.ignore_eos else tokenizer.eos_token_ids.union(ready.eos_token_ids)
    uids, seeds = map(list, zip(*samples, strict=True))
    if params.sampling_seed is not None:
        seeds = sample_seeds(params.sampling_seed, len(samples))
    first = Submit(
        uids[0],
        np.array(ids, "<i4").tobytes(),
        msgspec.structs.replace(
            params,
            max_new_tokens=min(params.max_new_tokens, fitting),
            **dict.fromkeys(GRAMMARS),  # the scheduler reads `grammar`
        ),
        tuple(sorted(eos.union(params.stop_token_ids))),
        seeds[0],
        prompt.extra_key,
        prompt.cache_salt,
        prompt.priority,
        grammar,
        logprobs=logprobs,
        embed=prompt.embed,
        group=prompt.group,
        hold=prompt.hold,
    )
    others = zip(uids[1:], seeds[1:], strict=True)
    replace = msgspec.structs.replace
    return [first, *(replace(first, uid=u, seed=s, leader=first.uid, hold=False) for u, s in others)]


def _logprobs(wanted: LogprobParams | None, prompt_tokens: int, ready: Ready) -> LogprobParams | None:
    if wanted is None:
        return None
    if wanted.start >= prompt_tokens:
        raise RequestError(
            f"logprob_start_len is {wanted.start}, the prompt has {prompt_tokens} tokens",
            param="logprob_start_len",
        )
    for token_id in wanted.ids:
        _check_id(token_id, "token_ids_logprob", ready.vocab_size)
    start = prompt_tokens if wanted.start < 0 else wanted.start
    return msgspec.structs.replace(wanted, start=start, top=min(wanted.top, ready.vocab_size))


def sample_seeds(seed: int, count: int) -> list[int]:
    """Seeds of `count` samples of one prompt: `seed` itself, then hashes of it and the sample's number.

    Both are hashed before they meet. The number is, so that no seed is one of the first sample's random numbers, which
    come from the seed and a position; the seed is hashed twice, so that seed 6's sample 7 is not seed 7's sample 6.
    """
    key = mix(mix(np.array([seed], np.int64).view(np.uint64)))
    hashes = mix(key ^ mix(np.arange(1, count, dtype=np.uint64)))
    return [seed, *hashes.view(np.int64).tolist()]


def check_lengths(prompts: Sequence[Prompt], tokenizer: Tokenizer, ready: Ready) -> None:
    """Refuses at once what cannot fit, so that nobody's tokens wait behind it.

    A text cannot where some of it is left though each token that fits is as long as the vocabulary's longest piece.
    """
    for prompt in prompts:
        if prompt.input_ids is not None:
            _check_length(len(prompt.input_ids), "tokens", _longest(ready), prompt.field, ready)
        elif len(prompt.text or "") > _SURELY_SHORT:
            piece = int(np.diff(tokenizer.pieces.offsets).max())
            _check_length(len(prompt.text or ""), "characters", piece * _longest(ready), prompt.field, ready)


def _longest(ready: Ready) -> int:
    return min(ready.max_prompt_tokens, ready.context_length - 1)


def _check_length(size: int, unit: str, longest: int, field: str, ready: Ready) -> None:
    if not size:
        raise RequestError("the prompt has no tokens", param=field)
    if size > longest:
        raise RequestError(
            f"the prompt has {size} {unit}; the longest that fits is {longest} "
            f"(context length {ready.context_length}, KV pool {ready.max_total_tokens})",
            param=field,
        )


def _check_ids(ids: list[Any], field: str, ready: Ready) -> None:
    if set(map(type, ids)) != {int} or min(ids) < 0 or max(ids) >= ready.vocab_size:
        for i, token_id in enumerate(ids):
            _check_id(token_id, f"{field}[{i}]", ready.vocab_size)


def _check_id(token_id: Any, field: str, vocab_size: int) -> None:
    if type(token_id) is not int or not 0 <= token_id < vocab_size:
        raise RequestError(
            f"{field} must be a token id from 0 to {vocab_size - 1}, got {reprlib.repr(token_id)}",
            param=field,
        )
