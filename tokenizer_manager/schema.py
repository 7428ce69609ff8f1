"""The body of POST /generate: every field that is read is checked here, before any work.

Fields are SGLang's. null means the default and unknown fields are ignored, since routers and clients send both; a
known field that is not served is refused, since ignoring it would answer another question than was asked.
"""

from __future__ import annotations

import reprlib
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from gapless.runtime.core.config import ServerConfig
from gapless.runtime.core.errors import RequestError
from gapless.runtime.core.sampling import SamplingParams

MAX_NAME_CHARS = 256  # of a rid or an extra_key

# Values that ask for nothing; a list of them, one a prompt, neither.
_NOT_YET: dict[str, tuple[Any, ...]] = {
    "input_embeds": (),
    "image_data": (),
    "video_data": (),
    "audio_data": (),
    "return_logprob": (False,),
    "logprob_start_len": (-1,),
    "top_logprobs_num": (0,),
    "token_ids_logprob": (),
    "return_hidden_states": (False,),
    "return_entropy": (False,),
    "return_bytes": (False,),
    "lora_path": (),
    "lora_id": (),
    "custom_logit_processor": (),
    "session_params": (),
    "priority": (0,),
    "bootstrap_host": (),
    "bootstrap_room": (),
}


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt of a request: `text` or `input_ids`. `field` and `params_field` name its origin in errors."""

    text: str | None
    input_ids: list[Any] | None  # checked against the vocabulary in `prepare`
    params: SamplingParams
    rid: str
    extra_key: str = ""
    field: str = "text"
    params_field: str = "sampling_params"


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    prompts: list[Prompt]
    is_batch: bool  # answered by a list, even of one
    stream: bool


def parse_generate(body: bytes | bytearray, config: ServerConfig) -> GenerateRequest:
    """A request from its JSON body; raises RequestError."""
    return parse_fields(_decode(body), config)


def parse_fields(fields: Mapping[str, Any], config: ServerConfig) -> GenerateRequest:
    """A request from its fields; raises RequestError naming the field, as in `sampling_params[1].top_p`."""
    for name, neutral in _NOT_YET.items():
        if not _is_neutral(fields.get(name), neutral):
            raise RequestError(f"{name} is not supported yet", param=name)
    source, prompts, is_batch = _prompts(fields)
    if len(prompts) > config.max_batch_requests:
        raise RequestError(
            f"{source} holds {len(prompts)} prompts; the most in one request is {config.max_batch_requests}",
            param=source,
        )
    size = len(prompts) if is_batch else None
    params = _sampling_params(fields.get("sampling_params"), size)
    rids = _rids(fields.get("rid"), size)
    extra_keys = _names(fields.get("extra_key"), "extra_key", size) or [""] * len(prompts)
    return GenerateRequest(
        [
            Prompt(
                text=prompt if source == "text" else None,
                input_ids=prompt if source == "input_ids" else None,
                params=params[i][1],
                rid=rids[i],
                extra_key=extra_keys[i],
                field=f"{source}[{i}]" if is_batch else source,
                params_field=params[i][0],
            )
            for i, prompt in enumerate(prompts)
        ],
        is_batch,
        _stream(fields.get("stream")),
    )


def _decode(body: bytes | bytearray) -> Mapping[str, Any]:
    try:
        fields = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError) as error:
        raise RequestError(f"the body is not valid JSON: {error}") from error
    if not isinstance(fields, dict):
        raise RequestError("the body must be a JSON object")
    return fields


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


def _sampling_params(value: Any, size: int | None) -> list[tuple[str, SamplingParams]]:
    """(name in errors, parameters) of each prompt."""
    named = _of_each_prompt(value, "sampling_params", size)
    parsed: dict[str, SamplingParams] = {}
    for name, item in named:
        if not isinstance(item, dict | None):
            raise _wrong(item, name, "an object")
        if name not in parsed:
            parsed[name] = SamplingParams.parse(item or {}, name)
    return [(name, parsed[name]) for name, _ in named]


def _rids(value: Any, size: int | None) -> list[str]:
    """The prompts' request ids: new ones where none are given; one given to a batch gets the prompt's number."""
    rids = _names(value, "rid", size)
    if rids is None:
        return [uuid.uuid4().hex for _ in range(size or 1)]
    if size is not None and isinstance(value, str):
        return [f"{rid}_{i}" for i, rid in enumerate(rids)]
    return rids


def _names(value: Any, field: str, size: int | None) -> list[str] | None:
    """A string for each prompt, or None where none was given."""
    if value is None:
        return None
    named = _of_each_prompt(value, field, size)
    for name, item in named:
        if not isinstance(item, str) or not 0 < len(item) <= MAX_NAME_CHARS:
            raise _wrong(item, name, f"a string of 1 to {MAX_NAME_CHARS} characters")
    return [item for _, item in named]


def _of_each_prompt(value: Any, field: str, size: int | None) -> list[tuple[str, Any]]:
    """(name in errors, value): a batch's list has a value for each prompt, anything else counts for all."""
    if size is None or not isinstance(value, list):
        return [(field, value)] * (size or 1)
    if len(value) != size:
        raise RequestError(f"{field} has {len(value)} entries for {size} prompts", param=field)
    return [(f"{field}[{i}]", item) for i, item in enumerate(value)]


def _stream(value: Any) -> bool:
    if not isinstance(value, bool | None):
        raise _wrong(value, "stream", "true or false")
    return bool(value)


def _wrong(value: Any, field: str, want: str) -> RequestError:
    return RequestError(f"{field} must be {want}, got {reprlib.repr(value)}", param=field)
