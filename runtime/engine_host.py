"""The engine's thread: the server's front and detokenizer on an event loop, with the scheduler's process as a child."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import os
import shutil
import threading
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

import zmq

from gapless.detokenizer.manager import DetokenizerManager
from gapless.runtime.core.child import Child, ChildSpec
from gapless.runtime.core.config import ServerConfig
from gapless.runtime.core.errors import GaplessError, UnavailableError
from gapless.runtime.core.ipc import DETOKENIZER, SCHEDULER, Receiver, Sender, private_directory
from gapless.runtime.core.messages import Fatal, Ready, StepOutput, ToDetokenizer
from gapless.runtime.tokenizer.base import Tokenizer
from gapless.runtime.tokenizer.load import load_tokenizer
from gapless.tokenizer_manager.answer import next_chunk, whole_answer
from gapless.tokenizer_manager.chat_template import apply_chat_template
from gapless.tokenizer_manager.embeddings import Embedding, check_dimensions, embedding
from gapless.tokenizer_manager.flush import FlushResult
from gapless.tokenizer_manager.front import Front
from gapless.tokenizer_manager.schema import GenerateRequest, check_group
from gapless.tokenizer_manager.states import Call, RequestState
from gapless.tokenizer_manager.tokenize import tokenize

T = TypeVar("T")
Answer = dict[str, Any]
_SCHEDULER_MODULE = "gapless.runtime.scheduler.main"
_LAST_WORDS_SECONDS = 5.0  # for calls to see that the engine was shut down under them


class EngineHost:
    """Coroutine methods run on the engine's loop, unless they say otherwise."""

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

    async def opened(self, request: GenerateRequest) -> Call:
        """`open`, awaited on the caller's loop."""
        opening = self.submit(self.open(request))
        try:
            return await asyncio.wrap_future(opening)
        except asyncio.CancelledError:
            opening.add_done_callback(self._abandon_opened)  # it may have come at that very moment
            raise

    def _abandon_opened(self, opening: concurrent.futures.Future[Call]) -> None:
        if not opening.cancelled() and opening.exception() is None:
            self.abandon(opening.result())

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
