"""POST /v1/embeddings."""

from __future__ import annotations

import base64
import reprlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from gapless.runtime.core.config import ServerConfig
from gapless.runtime.core.errors import GaplessError, RequestError
from gapless.tokenizer_manager.api import MAX_TIMEOUT_SECONDS, Name, Priority, Rid, TokenId
from gapless.tokenizer_manager.embeddings import check_dimensions, embedding, parse_embed
from gapless.tokenizer_manager.fields import parse_body
from gapless.tokenizer_manager.front import Front
from gapless.tokenizer_manager.info import ModelNotFoundError
from gapless.tokenizer_manager.openai.errors import renamed
from gapless.tokenizer_manager.routes import RouteSpec
from gapless.tokenizer_manager.schema import GenerateRequest
from gapless.tokenizer_manager.serving import Generating
from gapless.tokenizer_manager.states import RequestState

_NAMES = {"text": "input", "input_ids": "input"}
_PASSED_ON = ("rid", "priority", "extra_key", "cache_salt", "timeout")
_Text = Annotated[str, Meta(min_length=1)]
_Ids = Annotated[list[TokenId], Meta(min_length=1)]


class EmbeddingBody(msgspec.Struct, kw_only=True):
    """A text or several, or token ids or several lists of them."""

    input: _Text | Annotated[list[_Text | TokenId | _Ids], Meta(min_length=1)]
    model: Annotated[str, Meta(description="the served name, the model path or `default`")] | None = None
    encoding_format: (
        Annotated[Literal["float", "base64"], Meta(description="base64: of little-endian float32")] | None
    ) = "float"
    dimensions: Annotated[int, Meta(ge=1, description="the first so many, normalised")] | None = None
    user: Annotated[str, Meta(description="without effect")] | None = None
    rid: Rid | None = None
    priority: Priority | None = None
    extra_key: Name | None = None
    cache_salt: Name | None = None
    timeout: Annotated[float, Meta(gt=0, le=MAX_TIMEOUT_SECONDS)] | None = None


class EmbeddingItem(msgspec.Struct):
    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingUsage(msgspec.Struct):
    prompt_tokens: int
    total_tokens: int


class EmbeddingAnswer(msgspec.Struct):
    object: Literal["list"]
    data: list[EmbeddingItem]
    model: str
    usage: EmbeddingUsage


def routes(front: Front) -> list[RouteSpec]:
    async def parse(data: bytearray) -> EmbeddingForm:
        body = _read(data, front.config)
        check_dimensions(body.dimensions, front.ready)
        fields = {name: getattr(body, name) for name in _PASSED_ON} | _input(body.input)
        is_base64 = body.encoding_format == "base64"
        request = parse_embed(fields, front.config)
        return EmbeddingForm(request, front.config.model_name, is_base64, body.dimensions)

    return [
        RouteSpec(
            "/v1/embeddings",
            Generating(front, parse, lambda error: renamed(error, _NAMES)),
            ("POST",),
            summary="The last hidden state of each input's last token, normalised",
            body=EmbeddingBody,
            answer=EmbeddingAnswer,
        )
    ]


def _read(data: bytearray, config: ServerConfig) -> EmbeddingBody:
    body = parse_body(data, EmbeddingBody, strict=config.strict_fields)
    if body.model not in (None, config.model_name, config.model_path, "default"):
        raise ModelNotFoundError(
            f"the model {reprlib.repr(body.model)} does not exist here; {config.model_name!r} does",
            param="model",
        )
    return body


def _input(given: Any) -> dict[str, Any]:
    """As /generate's field: text where it is a string or a list of them, else ids."""
    items = given if isinstance(given, list) else [given]
    if len(kinds := set(map(type, items))) > 1:
        raise RequestError("input must not mix strings, ids and lists of ids", param="input")
    return {"text" if kinds == {str} else "input_ids": given}


@dataclass(frozen=True, slots=True)
class EmbeddingForm:
    """Satisfies `serving.Form`; nothing here streams."""

    request: GenerateRequest
    model: str
    base64: bool
    dimensions: int | None

    def answer(self, states: Sequence[RequestState]) -> Any:
        tokens = sum(state.prompt_tokens for state in states)
        return {
            "object": "list",
            "data": [self._item(state) for state in states],
            "model": self.model,
            "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
        }

    def events(self, state: RequestState) -> list[Any]:
        return []

    def failed(self, state: RequestState, error: GaplessError) -> Any:
        return error.body()

    def last_events(self, states: Sequence[RequestState]) -> list[Any]:
        return []

    def _item(self, state: RequestState) -> dict[str, Any]:
        values = embedding(state, self.dimensions)
        coded = base64.b64encode(values.astype("<f4").tobytes()).decode() if self.base64 else values.tolist()
        return {"object": "embedding", "index": state.index, "embedding": coded}
