"""The offline engine: the server's scheduler, tokenizer and detokenizer without HTTP.

The scheduler runs in a process of its own, as in the server, so that the caller's process never imports torch. The
server's front and detokenizer run here, on an event loop in one thread; callers of any thread hand it coroutines.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import os
import shutil
import threading
import weakref
from collections import deque
from collections.abc import AsyncIterator, Coroutine, Iterator, Sequence
from typing import Any, Self, TypeVar

import numpy as np
import zmq

from gapless.detokenizer.manager import DetokenizerManager
from gapless.runtime.core.child import Child, ChildSpec
from gapless.runtime.core.config import ServerConfig
from gapless.runtime.core.errors import ConfigError, GaplessError, UnavailableError
from gapless.runtime.core.ipc import DETOKENIZER, SCHEDULER, Receiver, Sender, private_directory
from gapless.runtime.core.messages import Fatal, Ready, StepOutput, ToDetokenizer
from gapless.runtime.tokenizer.base import Tokenizer
from gapless.runtime.tokenizer.load import load_tokenizer
from gapless.tokenizer_manager.answer import next_chunk, whole_answer
from gapless.tokenizer_manager.chat_template import apply_chat_template
from gapless.tokenizer_manager.embeddings import Embedding, check_dimensions, embedding, parse_embed
from gapless.tokenizer_manager.flush import FlushResult
from gapless.tokenizer_manager.front import Front
from gapless.tokenizer_manager.schema import GenerateRequest, check_group, parse_fields
from gapless.tokenizer_manager.states import Call, RequestState
from gapless.tokenizer_manager.tokenize import tokenize

T = TypeVar("T")
Answer = dict[str, Any]
_SCHEDULER_MODULE = "gapless.runtime.scheduler.main"
_LAST_WORDS_SECONDS = 5.0  # for calls to see that the engine was shut down under them
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
        self._host = _Host(_config(model_path, options))
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
            call = await asyncio.wrap_future(self._host.submit(self._host.open(request)))
            return Stream(self, call, request.is_list)
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


class _Host:
    """The engine's thread, with its event loop, its sockets and its child. Coroutine methods run on that loop."""

    def __init__(self, config: ServerConfig) -> None:
        self.config = config
        self.started: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._loop = asyncio.new_event_loop()
        self._closing = asyncio.Event()
        self._closed = False
        self._lock = threading.RLock()  # the garbage collector may call `abandon` at any point of this thread
        self._process = os.getpid()
        self._thread = threading.Thread(target=self._run, name="gapless-engine", daemon=True)
        self._thread.start()

    # ------------------------------------------------------------ from any thread

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        if self._is_copy():
            coroutine.close()
            raise UnavailableError(
                "this engine belongs to the process that forked this one; make another here"
            )
        with self._lock:
            if self._closed:
                coroutine.close()
                raise UnavailableError("the engine was shut down")
            return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def wait(self, coroutine: Coroutine[Any, Any, T]) -> T:
        future = self.submit(coroutine)
        try:
            return future.result()
        finally:
            future.cancel()  # where the wait was interrupted; else it has ended

    def abandon(self, call: Call) -> None:
        if self._is_copy():
            return
        with self._lock:
            if not self._closed:
                self._loop.call_soon_threadsafe(self._front.registry.close, call)

    def close(self) -> None:
        if self._is_copy():
            return
        with self._lock:
            if not self._closed:
                self._closed = True
                self._loop.call_soon_threadsafe(self._closing.set)
        if threading.current_thread() is not self._thread:  # the garbage collector runs anywhere
            self._thread.join()

    def _is_copy(self) -> bool:
        """After a fork: the thread is the parent's, and a lock that it held stays locked here."""
        return os.getpid() != self._process

    def _set_closed(self) -> None:
        with self._lock:
            self._closed = True

    # ------------------------------------------------------------ on the loop

    async def open(self, request: GenerateRequest) -> Call:
        """Sends the request's prompts to the scheduler."""
        self._front.check_open()
        interval = self.config.stream_interval if request.stream else 0
        call = self._front.registry.open(request.prompts, interval)
        try:
            await self._front.submit(call, request.prompts)
        except BaseException:
            self._front.registry.close(call)
            raise
        return call

    async def answer(self, request: GenerateRequest) -> list[Answer]:
        return [whole_answer(state) for state in await self._ended(request)]

    async def embed(self, request: GenerateRequest, dimensions: int | None) -> list[Embedding]:
        check_dimensions(dimensions, self._front.ready)
        return [embedding(state, dimensions) for state in await self._ended(request)]

    async def _ended(self, request: GenerateRequest) -> list[RequestState]:
        """Waits for the end of the request's samples; raises the error of the first that fails."""
        call = await self.open(request)
        try:
            open_states = len(call.states)
            while open_states:
                for state in await call.changed():
                    if (error := state.error()) is not None:
                        raise error
                    open_states -= 1
            return call.states
        finally:
            self._front.registry.close(call)

    async def release_group(self, group: str) -> None:
        self._front.release_group(check_group(group))

    async def tokenize(self, text: str, add_special_tokens: bool) -> list[int]:
        return await tokenize(self._front, text, add_special_tokens)

    async def apply_chat_template(
        self, messages: Sequence[dict[str, Any]], add_generation_prompt: bool
    ) -> str:
        return await apply_chat_template(self._front, messages, add_generation_prompt)

    async def flush_cache(self, timeout: float) -> FlushResult:
        return await self._front.flush_cache(timeout)

    async def update_weights(self, model_path: str, timeout: float) -> FlushResult:
        return await self._front.update_weights(model_path, timeout)

    async def chunks(self, call: Call) -> list[tuple[int, Answer | GaplessError]]:
        """(index, chunk or failure) of each sample that has something new; none once the call is closed."""
        incremental = self.config.incremental_streaming_output
        return [
            (state.index, state.error() or next_chunk(state, incremental)) for state in await call.changed()
        ]

    # ------------------------------------------------------------ the thread

    def _run(self) -> None:
        try:
            with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
                runner.run(self._serve())
        except BaseException as error:
            if self.started.done():
                raise
            self.started.set_exception(error)

    async def _serve(self) -> None:
        """From the start of the scheduler's process to its end."""
        async with contextlib.AsyncExitStack() as stack:
            stack.callback(self._set_closed)
            directory = private_directory()
            stack.callback(shutil.rmtree, directory, ignore_errors=True)
            context: zmq.Context[Any] = zmq.Context()
            stack.callback(context.destroy, linger=0)
            receiver: Receiver[ToDetokenizer] = Receiver(context, directory, DETOKENIZER)
            self._sender = Sender(context, directory, SCHEDULER)
            self._front = Front(self.config, self._sender.send)
            stack.callback(self._front.close)
            self._ready: asyncio.Future[None] = self._loop.create_future()
            # This thread outlives the child, as the parent-death signal asks.
            child = Child(_SCHEDULER_MODULE, ChildSpec(self.config, directory, parent_death_signal=True))
            exited = asyncio.Event()
            child.on_exit(lambda _: self._loop.call_soon_threadsafe(exited.set))
            stack.push_async_callback(exited.wait)
            stack.callback(child.kill)
            watching = asyncio.create_task(self._watch(child, exited))
            stack.callback(watching.cancel)
            stack.callback(receiver.read_on_loop(self._loop, self._handle))
            loading = asyncio.create_task(self._load())
            stack.callback(loading.cancel)
            closing = asyncio.create_task(self._closing.wait())
            await asyncio.wait({loading, closing}, return_when=asyncio.FIRST_COMPLETED)
            if not loading.done():
                raise UnavailableError("the engine was shut down while it was loading")
            loading.result()
            self.started.set_result(None)
            await closing
            watching.cancel()
            await self._end_calls()

    async def _load(self) -> None:
        """Waits for tokenizer and model; raises why one of them cannot be loaded."""
        tokenizer, _ = await asyncio.gather(
            asyncio.wrap_future(_load_in_background(self.config.model_path)), self._ready
        )
        self._detokenizer = DetokenizerManager(tokenizer.pieces)
        self._front.set_tokenizer(tokenizer)

    async def _watch(self, child: Child, exited: asyncio.Event) -> None:
        """A scheduler that dies while it loads fails the start, later it fails every call."""
        await exited.wait()
        error = child.failure()
        if self._ready.done():
            self._front.handle(Fatal(error.message))
        else:
            self._ready.set_exception(error)

    def _handle(self, message: ToDetokenizer) -> None:
        if isinstance(message, StepOutput):
            output, stops = self._detokenizer.handle(message)
            for stop in stops:
                self._sender.send(stop)
            self._front.handle(output)
            return
        self._front.handle(message)
        if isinstance(message, Ready):
            self._ready.set_result(None)

    async def _end_calls(self) -> None:
        self._front.draining = True
        self._front.fail_all(UnavailableError("the engine was shut down"))
        if tasks := asyncio.all_tasks() - {asyncio.current_task()}:
            await asyncio.wait(tasks, timeout=_LAST_WORDS_SECONDS)


def _config(model_path: str, options: dict[str, Any]) -> ServerConfig:
    known = {field.name for field in dataclasses.fields(ServerConfig)}
    if unknown := options.keys() - known:
        raise ConfigError(f"unknown option {min(unknown)!r}", param=min(unknown))
    return ServerConfig(**{**_DEFAULTS, **options, "model_path": model_path})


def _load_in_background(model_path: str) -> concurrent.futures.Future[Tokenizer]:
    """In a thread that nobody has to wait for: neither a shutdown meanwhile nor the end of the interpreter."""
    future: concurrent.futures.Future[Tokenizer] = concurrent.futures.Future()
    future.set_running_or_notify_cancel()

    def load() -> None:
        try:
            future.set_result(load_tokenizer(model_path))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=load, name="gapless-tokenizer", daemon=True).start()
    return future
