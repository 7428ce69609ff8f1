"""The offline engine: the server's scheduler, tokenizer and detokenizer without HTTP.

The scheduler runs in a process of its own, as in the server, so that the caller's process never imports torch. The
server's front and detokenizer run here, on an event loop in one thread; callers of any thread hand it coroutines.
"""

from __future__ import annotations

import asyncio
import dataclasses
import weakref
from collections import deque
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any, Self

import numpy as np

from gapless.runtime.core.config import ServerConfig
from gapless.runtime.core.errors import ConfigError, GaplessError
from gapless.runtime.engine_host import Answer, EngineHost
from gapless.tokenizer_manager.embeddings import Embedding, parse_embed
from gapless.tokenizer_manager.flush import FlushResult
from gapless.tokenizer_manager.schema import GenerateRequest, parse_fields
from gapless.tokenizer_manager.states import Call

_NO_LIMIT = (
    2**31 - 1
)  # the server's limits keep its clients from each other; a caller has no one to keep from
_DEFAULTS = {"log_level": "warning", "max_batch_requests": _NO_LIMIT, "max_queued_requests": _NO_LIMIT}


class Engine:
    """A loaded model. Options are the server's, by their names in Python: `Engine("demo", page_size=1)`.

    Works from any thread, inside a running event loop, and without a `__main__` guard; calls may overlap. Raises
    ConfigError or ModelLoadError where an option or the model is wrong. Use it in a `with` block or call `shutdown`;
    the end of the interpreter does that, too. A forked process needs an engine of its own.
    """

    def __init__(self, model_path: str = "demo", **options: Any) -> None:
        self._host = EngineHost(_config(model_path, options))
        self._close = weakref.finalize(self, self._host.close)
        try:
            self._host.started.result()
        except BaseException:
            self._close()
            raise

    def generate(
        self,
        prompt: str | list[str] | None = None,
        sampling_params: dict[str, Any] | list[dict[str, Any]] | None = None,
        *,
        input_ids: list[int] | list[list[int]] | None = None,
        stream: bool = False,
        extra_key: str | list[str] | None = None,
        cache_salt: str | list[str] | None = None,
        group_id: str | list[str] | None = None,
        hold_prefix: bool | list[bool] | None = None,
        priority: int | list[int] | None = None,
        return_logprob: bool | list[bool] | None = None,
        logprob_start_len: int | list[int] | None = None,
        top_logprobs_num: int | list[int] | None = None,
        token_ids_logprob: list[int] | list[list[int]] | None = None,
        return_text_in_logprobs: bool | None = None,
    ) -> Any:
        """What POST /generate answers: a dict for one prompt, a list of them for a list or for `n` above 1; a `Stream`
        where asked for. A list's other fields are one for all prompts or a list, too.

        `group_id` names requests that belong together; with `hold_prefix` the prompt's whole pages stay in the cache
        until `release_group`, or for as long as nobody needs their room (with max_new_tokens 0 that is all it does).

        Raises RequestError naming the field before any work is done, and InternalError when the engine has died.
        """
        request = self._request(
            text=prompt,
            sampling_params=sampling_params,
            input_ids=input_ids,
            stream=stream,
            extra_key=extra_key,
            cache_salt=cache_salt,
            group_id=group_id,
            hold_prefix=hold_prefix,
            priority=priority,
            return_logprob=return_logprob,
            logprob_start_len=logprob_start_len,
            top_logprobs_num=top_logprobs_num,
            token_ids_logprob=token_ids_logprob,
            return_text_in_logprobs=return_text_in_logprobs,
        )
        if stream:
            return Stream(self, self._host.wait(self._host.open(request)), request.is_list)
        answers = self._host.wait(self._host.answer(request))
        return answers if request.is_list else answers[0]

    async def async_generate(
        self,
        prompt: str | list[str] | None = None,
        sampling_params: dict[str, Any] | list[dict[str, Any]] | None = None,
        *,
        input_ids: list[int] | list[list[int]] | None = None,
        stream: bool = False,
        extra_key: str | list[str] | None = None,
        cache_salt: str | list[str] | None = None,
        group_id: str | list[str] | None = None,
        hold_prefix: bool | list[bool] | None = None,
        priority: int | list[int] | None = None,
        return_logprob: bool | list[bool] | None = None,
        logprob_start_len: int | list[int] | None = None,
        top_logprobs_num: int | list[int] | None = None,
        token_ids_logprob: list[int] | list[list[int]] | None = None,
        return_text_in_logprobs: bool | None = None,
    ) -> Any:
        """`generate` for a coroutine: cancelling it aborts the request."""
        request = self._request(
            text=prompt,
            sampling_params=sampling_params,
            input_ids=input_ids,
            stream=stream,
            extra_key=extra_key,
            cache_salt=cache_salt,
            group_id=group_id,
            hold_prefix=hold_prefix,
            priority=priority,
            return_logprob=return_logprob,
            logprob_start_len=logprob_start_len,
            top_logprobs_num=top_logprobs_num,
            token_ids_logprob=token_ids_logprob,
            return_text_in_logprobs=return_text_in_logprobs,
        )
        if stream:
            return Stream(self, await self._host.opened(request), request.is_list)
        answers = await asyncio.wrap_future(self._host.submit(self._host.answer(request)))
        return answers if request.is_list else answers[0]

    def embed(
        self,
        prompt: str | list[str] | None = None,
        *,
        input_ids: list[int] | list[list[int]] | None = None,
        dimensions: int | None = None,
    ) -> Embedding:
        """What POST /v1/embeddings answers, in float32: [N] for one prompt, [prompts, N] for a list of them.

        Raises RequestError naming the field before any work is done, and InternalError when the engine has died.
        """
        request = parse_embed({"text": prompt, "input_ids": input_ids}, self._host.config)
        embeddings = self._host.wait(self._host.embed(request, dimensions))
        return np.stack(embeddings) if request.is_list else embeddings[0]

    def release_group(self, group_id: str) -> None:
        """Lets go of what the group holds in the cache. A group that nobody knows, or no longer, is no error."""
        self._host.wait(self._host.release_group(group_id))

    async def async_release_group(self, group_id: str) -> None:
        await asyncio.wrap_future(self._host.submit(self._host.release_group(group_id)))

    def tokenize(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The token ids of a text; what comes from `apply_chat_template` has its special tokens already."""
        return self._host.wait(self._host.tokenize(text, add_special_tokens))

    async def async_tokenize(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return await asyncio.wrap_future(self._host.submit(self._host.tokenize(text, add_special_tokens)))

    def apply_chat_template(
        self, messages: Sequence[dict[str, Any]], add_generation_prompt: bool = True
    ) -> str:
        """The prompt that the model's chat template, or the one of the option `chat_template`, makes of messages.

        `messages` are as in POST /v1/chat/completions. Raises RequestError where there is no template, or in its words.
        """
        return self._host.wait(self._host.apply_chat_template(messages, add_generation_prompt))

    async def async_apply_chat_template(
        self, messages: Sequence[dict[str, Any]], add_generation_prompt: bool = True
    ) -> str:
        applied = self._host.apply_chat_template(messages, add_generation_prompt)
        return await asyncio.wrap_future(self._host.submit(applied))

    def flush_cache(self, timeout: float = 0.0) -> FlushResult:
        """Forgets all cached prefixes, as POST /flush_cache: true where that was done, false while requests run.

        `timeout`: seconds to wait for them to end. Raises UnavailableError when the engine has died.
        """
        return self._host.wait(self._host.flush_cache(timeout))

    def update_weights_from_disk(self, model_path: str, timeout: float = 60.0) -> FlushResult:
        """Takes other weights of the same shape once open calls have ended; false where they do not within `timeout`.

        Raises RequestError, with the old weights in use, where these cannot be taken.
        """
        return self._host.wait(self._host.update_weights(model_path, timeout))

    def shutdown(self) -> None:
        """Ends the scheduler's process. Open calls raise UnavailableError, and so do later ones."""
        self._close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    def _request(self, **fields: Any) -> GenerateRequest:
        return parse_fields(fields, self._host.config)


class Stream(Iterator[Answer], AsyncIterator[Answer]):
    """The chunks of one call, for a `for` or an `async for` loop; those of a list carry an `index`.

    It keeps its engine alive. Closing it, or dropping the last reference to it, aborts what still runs.
    """

    def __init__(self, engine: Engine, call: Call, is_list: bool) -> None:
        self._engine, self._host, self._call, self._is_list = engine, engine._host, call, is_list
        self._open = len(call.states)
        self._chunks: deque[Answer | GaplessError] = deque()
        self.close = weakref.finalize(self, self._host.abandon, call)

    def __next__(self) -> Answer:
        while not self._chunks and self._open:
            self._host.wait(self._advance())
        if not self._chunks:
            raise StopIteration
        return self._next_chunk()

    async def __anext__(self) -> Answer:
        while not self._chunks and self._open:
            await asyncio.wrap_future(self._host.submit(self._advance()))
        if not self._chunks:
            raise StopAsyncIteration
        return self._next_chunk()

    async def _advance(self) -> None:
        """Waits for chunks and keeps them. On the engine's loop, so that a caller who stops waiting loses none."""
        chunks = await self._host.chunks(self._call)
        for index, chunk in chunks:
            if isinstance(chunk, GaplessError):
                self._chunks.append(chunk)
                self._open -= 1
            else:
                self._chunks.append(chunk | {"index": index} if self._is_list else chunk)
                self._open -= chunk["meta_info"]["finish_reason"] is not None
        if not chunks:  # it was closed
            self._open = 0

    def _next_chunk(self) -> Answer:
        chunk = self._chunks.popleft()
        if isinstance(chunk, GaplessError):
            raise chunk
        return chunk


def _config(model_path: str, options: dict[str, Any]) -> ServerConfig:
    known = {field.name for field in dataclasses.fields(ServerConfig)}
    if unknown := options.keys() - known:
        raise ConfigError(f"unknown option {min(unknown)!r}", param=min(unknown))
    return ServerConfig(**{**_DEFAULTS, **options, "model_path": model_path})
