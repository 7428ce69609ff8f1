"""The body of POST /generate: every field that is read is checked here, before any work.

Fields are SGLang's. null means the default and unknown fields are ignored, since routers and clients send both; a
known field that is not served is refused, since ignoring it would answer another question than was asked.
"""

from __future__ import annotations

import itertools
import reprlib
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gapless.runtime.core.config import ServerConfig
from gapless.runtime.core.errors import RequestError
from gapless.runtime.core.logprobs import MAX_LOGPROBS, LogprobParams
from gapless.runtime.core.sampling import SamplingParams
from gapless.tokenizer_manager.api import MAX_NAME_CHARS, MAX_TIMEOUT_SECONDS, GenerateBody, SamplingFields
from gapless.tokenizer_manager.fields import check_known, decode_object

# Values that ask for nothing; a list of them, one a prompt, neither.
_NOT_YET: dict[str, tuple[Any, ...]] = {
    "input_embeds": (),
    "image_data": (),
    "video_data": (),
    "audio_data": (),
    "return_hidden_states": (False,),
    "return_entropy": (False,),
    "return_bytes": (False,),
    "lora_path": (),
    "lora_id": (),
    "custom_logit_processor": (),
    "session_params": (),
    "bootstrap_host": (),
    "bootstrap_room": (),
}


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt of a request: `text` or `input_ids`, and `params.n` samples to make of it.

    `rid` is the request id that was given, which may stand for several samples; `rids` are the samples' own.
    `field` and `params_field` name the prompt's origin in errors.
    """

    text: str | None
    input_ids: list[Any] | None  # checked against the vocabulary in `prepare`
    params: SamplingParams
    rid: str
    rids: tuple[str, ...]
    extra_key: str = ""
    cache_salt: str = ""
    priority: int = 0
    add_special_tokens: bool = True  # to `text`
    logprobs: LogprobParams | None = None  # a start of -1: none of the prompt's
    embed: bool = False  # instead of tokens
    group: str = ""
    hold: bool = False  # the prompt's pages, for the group
    field: str = "text"
    params_field: str = "sampling_params"


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    prompts: list[Prompt]
    is_list: bool  # answered by a list: a batch, even of one, or n above 1
    stream: bool
    timeout: float | None = None  # seconds from now to the end of all its samples


def parse_generate(body: bytes | bytearray, config: ServerConfig) -> GenerateRequest:
    """A request from its JSON body; raises RequestError."""
    return parse_fields(decode_object(body), config)


def parse_fields(fields: Mapping[str, Any], config: ServerConfig) -> GenerateRequest:
    """A request from its fields; raises RequestError naming the field, as in `sampling_params[1].top_p`."""
    if config.strict_fields:
        check_known(fields, GenerateBody.__struct_fields__ + tuple(_NOT_YET))
    for name, neutral in _NOT_YET.items():
        if (value := fields.get(name)) is not None and not _is_neutral(value, neutral):
            raise RequestError(f"{name} is not supported yet", param=name)
    source, prompts, is_batch = _prompts(fields)
    if len(prompts) > config.max_batch_requests:
        raise RequestError(
            f"{source} holds {len(prompts)} prompts; the most in one request is {config.max_batch_requests}",
            param=source,
        )
    size = len(prompts) if is_batch else None
    params = _sampling_params(fields.get("sampling_params"), size, config.strict_fields)
    samples = _samples(params, config.max_batch_requests)
    rids = _rids(fields.get("rid"), size, samples)
    extra_keys = _keys(fields.get("extra_key"), "extra_key", size)
    cache_salts = _keys(fields.get("cache_salt"), "cache_salt", size)
    groups = _groups(fields, size)
    priorities = _priorities(fields.get("priority"), size)
    logprobs = _logprobs(fields, size)
    return GenerateRequest(
        [
            Prompt(
                text=prompt if source == "text" else None,
                input_ids=prompt if source == "input_ids" else None,
                params=params[i][1],
                rid=rids[i][0],
                rids=rids[i][1],
                extra_key=extra_keys[i],
                cache_salt=cache_salts[i],
                group=groups[i][0],
                hold=groups[i][1],
                priority=priorities[i],
                logprobs=logprobs[i],
                field=f"{source}[{i}]" if is_batch else source,
                params_field=params[i][0],
            )
            for i, prompt in enumerate(prompts)
        ],
        is_batch or samples[0] > 1,
        _flag(fields.get("stream"), "stream"),
        _timeout(fields.get("timeout")),
    )


def _is_neutral(value: Any, neutral: tuple[Any, ...]) -> bool:
    items = value if isinstance(value, list) else [value]
    return all(i is None or any(type(i) is type(n) and i == n for n in neutral) for i in items)


def _prompts(fields: Mapping[str, Any]) -> tuple[str, list[Any], bool]:
    """(field, prompts, whether they came as a batch)."""
    text, ids = fields.get("text"), fields.get("input_ids")
    if text is not None and ids is not None:
        raise RequestError("give text or input_ids, not both", param="input_ids")
    if text is not None:
        return "text", *_texts(text)
    if ids is not None:
        return "input_ids", *_id_lists(ids)
    raise RequestError("text or input_ids is needed", param="text")


def _texts(text: Any) -> tuple[list[str], bool]:
    if isinstance(text, str):
        return [text], False
    if not isinstance(text, list) or not text:
        raise _wrong(text, "text", "a string or a list of strings, not empty")
    for i, item in enumerate(text):
        if not isinstance(item, str):
            raise _wrong(item, f"text[{i}]", "a string")
    return text, True


def _id_lists(ids: Any) -> tuple[list[list[Any]], bool]:
    if not isinstance(ids, list) or not ids:
        raise _wrong(ids, "input_ids", "a list of token ids or a list of such lists, not empty")
    if not isinstance(ids[0], list):
        return [ids], False
    for i, item in enumerate(ids):
        if not isinstance(item, list) or not item:
            raise _wrong(item, f"input_ids[{i}]", "a list of token ids, not empty")
    return ids, True


def _sampling_params(value: Any, size: int | None, strict: bool) -> list[tuple[str, SamplingParams]]:
    """(name in errors, parameters) of each prompt."""
    named = _of_each_prompt(value, "sampling_params", size)
    parsed: dict[str, SamplingParams] = {}
    for name, item in named:
        if not isinstance(item, dict | None):
            raise _wrong(item, name, "an object")
        if name not in parsed:
            if strict:
                check_known(item or {}, SamplingFields.__struct_fields__, f"{name}.")
            parsed[name] = SamplingParams.parse(item or {}, name)
    return [(name, parsed[name]) for name, _ in named]


def _samples(params: list[tuple[str, SamplingParams]], limit: int) -> list[int]:
    """How many samples each prompt asks for; RequestError where they are too many together."""
    samples = [item.n for _, item in params]
    if sum(samples) > limit:
        name, most = max(params, key=lambda named: named[1].n)
        raise RequestError(
            f"{name}.n asks for {most.n} samples, {sum(samples)} in all; the most in one request is {limit}",
            param=f"{name}.n",
        )
    return samples


def _rids(value: Any, size: int | None, samples: list[int]) -> list[tuple[str, tuple[str, ...]]]:
    """(request id, the ids of its samples) of each prompt; new ones where none are given.

    An id that stands for several samples, or was given to a batch as a whole, is numbered through for them.
    """
    if value is None:
        rids = [uuid.uuid4().hex for _ in samples]
    else:
        rids = [_string(item, name, 1) for name, item in _of_each_prompt(value, "rid", size)]
    of_batch = size is not None and isinstance(value, str)
    numbers = itertools.count()
    named = []
    for rid, count in zip(rids, samples, strict=True):
        if not of_batch:
            numbers = itertools.count()
        numbered = of_batch or count > 1
        named.append((rid, tuple(f"{rid}_{next(numbers)}" for _ in range(count)) if numbered else (rid,)))
    return named


def _keys(value: Any, field: str, size: int | None) -> list[str]:
    """A part of each prompt's key in the cache, empty where none is given."""
    named = _of_each_prompt(value, field, size)
    return ["" if item is None else _string(item, name, 0) for name, item in named]


def _groups(fields: Mapping[str, Any], size: int | None) -> list[tuple[str, bool]]:
    """(group, whether it is to hold the prompt's pages) of each prompt."""
    groups = _keys(fields.get("group_id"), "group_id", size)
    named = _of_each_prompt(fields.get("hold_prefix"), "hold_prefix", size)
    holds = [(name, _flag(item, name)) for name, item in named]
    for group, (name, hold) in zip(groups, holds, strict=True):
        if hold and not group:
            raise RequestError(f"{name} needs a group_id, by which the prefix is released", param=name)
    return [(group, hold) for group, (_, hold) in zip(groups, holds, strict=True)]


def check_group(group: Any) -> str:
    """A group that is named by itself."""
    return _string(group, "group_id", 1)


def _string(value: Any, field: str, least: int) -> str:
    if not isinstance(value, str) or not least <= len(value) <= MAX_NAME_CHARS:
        raise _wrong(value, field, f"a string of {least} to {MAX_NAME_CHARS} characters")
    if any(
        "\ud800" <= char <= "\udfff" for char in value
    ):  # from a caller in Python: JSON's are refused before
        raise _wrong(value, field, "text without lone surrogates")
    return value


def _priorities(value: Any, size: int | None) -> list[int]:
    named = _of_each_prompt(value, "priority", size)
    return [_integer(item, name, -(2**31), 2**31 - 1, 0) for name, item in named]


def _logprobs(fields: Mapping[str, Any], size: int | None) -> list[LogprobParams | None]:
    """What is asked for of each prompt; the limits hold even where nothing is."""
    asked = [
        _flag(item, name)
        for name, item in _of_each_prompt(fields.get("return_logprob"), "return_logprob", size)
    ]
    named = _of_each_prompt(fields.get("logprob_start_len"), "logprob_start_len", size)
    starts = [_integer(item, name, -1, 2**31 - 1, -1) for name, item in named]
    named = _of_each_prompt(fields.get("top_logprobs_num"), "top_logprobs_num", size)
    tops = [_integer(item, name, 0, MAX_LOGPROBS, 0) for name, item in named]
    ids = fields.get("token_ids_logprob")
    if size is not None and isinstance(ids, list) and not any(isinstance(item, list | None) for item in ids):
        ids = [ids] * size
    chosen = [_chosen_ids(item, name) for name, item in _of_each_prompt(ids, "token_ids_logprob", size)]
    text = _flag(fields.get("return_text_in_logprobs"), "return_text_in_logprobs")
    return [
        LogprobParams(start, top, ids, text) if wanted else None
        for wanted, start, top, ids in zip(asked, starts, tops, chosen, strict=True)
    ]


def _chosen_ids(value: Any, field: str) -> tuple[int, ...]:
    if value is None:
        return ()
    if not isinstance(value, list) or len(value) > MAX_LOGPROBS:
        raise _wrong(value, field, f"a list of at most {MAX_LOGPROBS} token ids")
    for i, item in enumerate(value):
        if type(item) is not int or not 0 <= item < 2**31:
            raise _wrong(item, f"{field}[{i}]", "a token id")
    return tuple(value)


def _integer(value: Any, field: str, low: int, high: int, default: int) -> int:
    if value is None:
        return default
    if type(value) is not int or not low <= value <= high:
        raise _wrong(value, field, f"an integer from {low} to {high}")
    return value


def _of_each_prompt(value: Any, field: str, size: int | None) -> list[tuple[str, Any]]:
    """(name in errors, value): a batch's list has a value for each prompt, anything else counts for all."""
    if size is None or not isinstance(value, list):
        return [(field, value)] * (size or 1)
    if len(value) != size:
        raise RequestError(f"{field} has {len(value)} entries for {size} prompts", param=field)
    return [(f"{field}[{i}]", item) for i, item in enumerate(value)]


def _flag(value: Any, field: str) -> bool:
    if not isinstance(value, bool | None):
        raise _wrong(value, field, "true or false")
    return bool(value)


def _timeout(value: Any) -> float | None:
    if value is None:
        return None
    if type(value) not in (int, float) or not 0 < value <= MAX_TIMEOUT_SECONDS:
        raise _wrong(value, "timeout", f"a number of seconds above 0 and at most {MAX_TIMEOUT_SECONDS}")
    return float(value)


def _wrong(value: Any, field: str, want: str) -> RequestError:
    return RequestError(f"{field} must be {want}, got {reprlib.repr(value)}", param=field)
