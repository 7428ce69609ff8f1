"""An OpenAI body, checked and turned into the fields of /generate, where all limits and sampling values are checked."""

from __future__ import annotations

import reprlib
import uuid
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from gapless.runtime.core.config import ServerConfig
from gapless.runtime.core.errors import RequestError
from gapless.tokenizer_manager.fields import check_known, convert, decode_object
from gapless.tokenizer_manager.info import ModelNotFoundError
from gapless.tokenizer_manager.openai.api import NO_EFFECT, CommonBody, ResponseFormat

T = TypeVar("T", bound=CommonBody)
_PLAIN = (
    "n", "temperature", "top_p", "frequency_penalty", "presence_penalty", "logit_bias", "stop", "top_k", "min_p",
    "repetition_penalty", "stop_token_ids", "ignore_eos", "skip_special_tokens", "no_stop_trim", "regex", "ebnf",
)  # fmt: skip
_PASSED_ON = ("stream", "priority", "extra_key", "cache_salt", "timeout")
# Known to clients and not served: only these values, which ask for nothing, and null are taken.
NOT_SERVED: dict[str, tuple[Any, ...]] = {
    "prompt_logprobs": (),
    "best_of": (1,),
    "lora_path": (),
    "return_hidden_states": (False,),
    "session_params": (),
    "custom_logit_processor": (),
    "bootstrap_host": (),
    "bootstrap_room": (),
}


def read(
    data: bytes | bytearray,
    kind: type[T],
    config: ServerConfig,
    not_served: Mapping[str, tuple[Any, ...]],
) -> T:
    """The body as a `kind`; RequestError names the field that is wrong, unknown under --strict-fields or not served."""
    not_served = {**NOT_SERVED, **not_served}
    fields = decode_object(data)
    if config.strict_fields:
        check_known(fields, (*kind.__struct_fields__, *NO_EFFECT, *not_served))
    for name, neutral in not_served.items():
        value = fields.get(name)
        if value is not None and not any(type(value) is type(n) and value == n for n in neutral):
            raise RequestError(f"{name} is not supported", param=name)
    body = convert(fields, kind)
    if body.model not in (None, config.model_name, config.model_path, "default"):
        raise ModelNotFoundError(
            f"the model {reprlib.repr(body.model)} does not exist here; {config.model_name!r} does",
            param="model",
        )
    return body


def native_fields(body: CommonBody, prefix: str, max_tokens: int) -> dict[str, Any]:
    """/generate's fields but the prompt's; `prefix` begins a request id where none is given."""
    sampling: dict[str, Any] = {name: getattr(body, name) for name in _PLAIN}
    sampling |= {
        "max_new_tokens": max_tokens,
        "min_new_tokens": body.min_tokens,
        "sampling_seed": body.seed,
        "json_schema": _schema(body.response_format),
    }
    fields = {name: getattr(body, name) for name in _PASSED_ON}
    rid = body.rid or f"{prefix}-{uuid.uuid4().hex}"
    return fields | {"rid": rid, "sampling_params": sampling}


def _schema(wanted: ResponseFormat | None) -> str | None:
    if wanted is None or wanted.type == "text":
        return None
    if wanted.type == "json_object":
        return '{"type":"object"}'
    if wanted.json_schema is None or wanted.json_schema.schema is None:
        raise RequestError(
            "response_format.json_schema.schema is needed for the type json_schema",
            param="response_format.json_schema.schema",
        )
    return msgspec.json.encode(wanted.json_schema.schema).decode()
