"""POST /tokenize and /detokenize, in the shapes of SGLang and vLLM."""

from __future__ import annotations

import asyncio
import reprlib
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from gapless.runtime.core.errors import RequestError, UnavailableError
from gapless.runtime.core.messages import Ready
from gapless.runtime.tokenizer.base import Tokenizer
from gapless.tokenizer_manager.api import DetokenizeAnswer, DetokenizeBody, TokenizeAnswer, TokenizeBody
from gapless.tokenizer_manager.fields import read_body
from gapless.tokenizer_manager.front import INLINE_SIZE, Front
from gapless.tokenizer_manager.responses import json_response
from gapless.tokenizer_manager.routes import RouteSpec


def routes(front: Front) -> list[RouteSpec]:
    tokenize = _Tokenize(front)
    return [
        RouteSpec(
            "/tokenize",
            tokenize.tokenize,
            ("POST",),
            summary="Token ids of texts",
            body=TokenizeBody,
            answer=TokenizeAnswer,
        ),
        RouteSpec(
            "/detokenize",
            tokenize.detokenize,
            ("POST",),
            summary="The text of token ids",
            body=DetokenizeBody,
            answer=DetokenizeAnswer,
        ),
    ]


async def tokenize(front: Front, text: str, add_special_tokens: bool) -> list[int]:
    """For the engine's callers: a short text costs less than a thread."""
    front.check_open()
    tokenizer = front.tokenizer
    assert tokenizer is not None
    if not isinstance(text, str):
        raise RequestError(f"text must be a string, got {reprlib.repr(text)}", param="text")
    if len(text) <= INLINE_SIZE:
        return tokenizer.encode(text, add_special_tokens)
    return await asyncio.to_thread(tokenizer.encode, text, add_special_tokens)


class _Tokenize:
    """Both work in a thread, whatever the size: they may take long, and nobody waits for them within a step."""

    def __init__(self, front: Front) -> None:
        self._front = front

    async def tokenize(self, request: Request) -> Response:
        tokenizer, ready = self._loaded()
        body = await self._read(request, TokenizeBody)
        if (body.prompt is None) == (body.text is None):
            raise RequestError("give prompt or text, one of them", param="prompt")
        text = body.text if body.prompt is None else body.prompt
        texts = [text] if isinstance(text, str) else text
        assert texts is not None
        self._check_batch(texts, "text" if body.prompt is None else "prompt")
        ids = await asyncio.to_thread(tokenizer.encode_batch, texts, body.add_special_tokens)
        counts = list(map(len, ids))
        tokens, count = (ids[0], counts[0]) if isinstance(text, str) else (ids, counts)
        return json_response({"tokens": tokens, "count": count, "max_model_len": ready.context_length})

    async def detokenize(self, request: Request) -> Response:
        tokenizer, ready = self._loaded()
        body = await self._read(request, DetokenizeBody)
        is_batch = bool(body.tokens) and isinstance(body.tokens[0], list)
        lists: list[Any] = body.tokens if is_batch else [body.tokens]
        self._check_batch(lists, "tokens")
        limit = min(ready.vocab_size, tokenizer.vocab_size)
        for i, ids in enumerate(lists):
            _check_ids(ids, f"tokens[{i}]" if is_batch else "tokens", limit)
        texts = await asyncio.to_thread(
            lambda: [tokenizer.decode(ids, body.skip_special_tokens) for ids in lists]
        )
        text = texts if is_batch else texts[0]
        return json_response({"text": text, "prompt": text})

    async def _read(self, request: Request, kind: Any) -> Any:
        return await read_body(request, self._front.body_room, kind, strict=self._front.config.strict_fields)

    def _loaded(self) -> tuple[Tokenizer, Ready]:
        """Raises UnavailableError until the model is there; a stalled engine is no hindrance."""
        tokenizer, ready = self._front.tokenizer, self._front.ready
        if tokenizer is None or ready is None:
            raise UnavailableError("the model is loading")
        return tokenizer, ready

    def _check_batch(self, items: list[Any], field: str) -> None:
        most = self._front.config.max_batch_requests
        if len(items) > most:
            raise RequestError(
                f"{field} holds {len(items)} items; the most in one request is {most}", param=field
            )


def _check_ids(ids: Any, field: str, limit: int) -> None:
    if not isinstance(ids, list):
        raise RequestError(f"{field} must be a list of token ids, as the first item is", param=field)
    for i, token_id in enumerate(ids):
        if not isinstance(token_id, int) or token_id >= limit:
            raise RequestError(
                f"{field}[{i}] must be a token id from 0 to {limit - 1}", param=f"{field}[{i}]"
            )
