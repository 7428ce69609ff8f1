"""The HTTP side over an engine that a test plays by hand. Every wait is bounded; nothing sleeps to synchronise."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import httpx
import pytest

from gapless.runtime.core.config import ServerConfig
from gapless.runtime.core.messages import (
    Abort,
    Finish,
    Finished,
    Flush,
    Flushed,
    Ready,
    Submit,
    TextOutput,
    column,
    int32s,
)
from gapless.runtime.tokenizer.byte_tokenizer import ByteTokenizer
from gapless.tokenizer_manager.app import create_app
from gapless.tokenizer_manager.front import Front
from gapless.tokenizer_manager.main import HttpServer

WAIT = 20.0
M = TypeVar("M")
READY = Ready(
    vocab_size=600, context_length=64, max_total_tokens=500, max_prompt_tokens=60, eos_token_ids=(599,),
    load_seconds=1.5, info={"device": "fake"},
)  # fmt: skip


class Engine:
    """The scheduler and the detokenizer in one: it takes messages and says what each request gained.

    With `echo` every request is answered at once by its prompt, limited by max_new_tokens.
    """

    def __init__(self, echo: bool) -> None:
        self.echo = echo
        self.now = 0.0  # seconds on the front's clock
        self.front: Front
        self.sent: list[Submit | Abort | Flush] = []
        self._inbox: asyncio.Queue[Submit | Abort | Flush] = asyncio.Queue()

    def send(self, message: Submit | Abort | Flush) -> None:
        self.sent.append(message)
        self._inbox.put_nowait(message)
        if self.echo and isinstance(message, Submit):
            asyncio.get_running_loop().call_soon(self._answer, message)

    def _answer(self, message: Submit) -> None:
        ids = int32s(message.input_ids)[: message.params.max_new_tokens].tolist()
        self.gain(message.uid, ByteTokenizer().decode(ids), ids, Finish.LENGTH)

    def aborts(self) -> list[int]:
        return [m.uid for m in self.sent if isinstance(m, Abort)]

    async def answer_flush(self, running: int = 0, waiting: int = 0, pages: int = 0) -> None:
        """Takes the next message, a Flush, and refuses it where something runs or waits."""
        number = (await self.take(Flush)).number
        self.front.handle(Flushed(number, not running + waiting, pages, running, waiting))

    async def take(self, kind: type[M]) -> M:
        """The next message, which must be of `kind`."""
        message = await asyncio.wait_for(self._inbox.get(), WAIT)
        assert isinstance(message, kind)
        return message

    def gain(
        self,
        uid: int,
        text: str = "",
        ids: Sequence[int] = (),
        finish: Finish = Finish.NONE,
        matched: int | str | None = None,
        message: str = "",
        code: str = "",
    ) -> None:
        end = Finished(uid, finish, matched, message, code, 3, len(ids), 1)
        self.front.handle(
            TextOutput(
                column([uid], "<i8"),
                [text],
                column([len(ids)], "<i4"),
                column(ids, "<i4"),
                [end] if finish else [],
                [(uid, 3, 1)],
            )
        )


class Service:
    """A front with its engine, and a client of it."""

    def __init__(self, front: Front, engine: Engine, client: httpx.AsyncClient, port: int = 0) -> None:
        self.front, self.engine, self.client, self.port = front, engine, client, port

    async def generate(self, **body: Any) -> httpx.Response:
        return await self.client.post("/generate", json=body)

    def stream(self, **body: Any) -> EventStream:
        return EventStream(self, **body)

    async def start(self, **body: Any) -> tuple[asyncio.Task[httpx.Response], Submit]:
        """Posts without waiting for the answer, and takes what reaches the engine."""
        task = asyncio.create_task(self.generate(**body))
        return task, await self.engine.take(Submit)

    def flush(self, **query: Any) -> asyncio.Task[httpx.Response]:
        return asyncio.create_task(self.client.post("/flush_cache", params=query))


class EventStream:
    """A streamed POST /generate, read event by event."""

    def __init__(self, service: Service, **body: Any) -> None:
        request = service.client.build_request("POST", "/generate", json=body | {"stream": True})
        self._sending = asyncio.create_task(service.client.send(request, stream=True))
        self._lines: AsyncIterator[str] | None = None
        self.response: httpx.Response

    async def next(self) -> Any:
        """The next event; "[DONE]" and the end of the body as such, the latter as None."""
        if self._lines is None:
            self.response = await self._sending
            self._lines = self.response.aiter_lines()
        async for line in self._lines:
            if line:
                data = line.removeprefix("data: ")
                return data if data == "[DONE]" else json.loads(data)
        return None

    async def close(self) -> None:
        await (await self._sending).aclose()


def _front(echo: bool, loaded: bool, options: dict[str, Any]) -> tuple[Front, Engine]:
    engine = Engine(echo)
    engine.front = Front(ServerConfig(model_path="toy", **options), engine.send, lambda: engine.now)
    if loaded:
        engine.front.tokenizer = ByteTokenizer()
        engine.front.handle(READY)
    return engine.front, engine


@asynccontextmanager
async def _in_process(*, echo: bool = True, loaded: bool = True, **options: Any) -> AsyncIterator[Service]:
    front, engine = _front(echo, loaded, options)
    transport = httpx.ASGITransport(create_app(front), raise_app_exceptions=False)
    try:
        async with httpx.AsyncClient(transport=transport, base_url="http://test", timeout=WAIT) as client:
            yield Service(front, engine, client)
    finally:
        front.close()


@asynccontextmanager
async def _on_a_socket(*, echo: bool = False, loaded: bool = True, **options: Any) -> AsyncIterator[Service]:
    front, engine = _front(echo, loaded, options)
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    server = HttpServer(front)
    serving = asyncio.create_task(server.serve([listener]))
    try:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=WAIT) as client:
            yield Service(front, engine, client, port)
    finally:
        front.close()
        server.should_exit = True
        await asyncio.wait_for(serving, WAIT)


MakeService = Callable[..., Any]


@pytest.fixture
def in_process() -> MakeService:
    """The application called without a socket, over an engine that echoes."""
    return _in_process


@pytest.fixture
def on_a_socket() -> MakeService:
    """The real HTTP server on a free port, over an engine that answers when told."""
    return _on_a_socket


@pytest.fixture
def run() -> Callable[[Coroutine[Any, Any, None]], None]:
    def bounded(test: Coroutine[Any, Any, None]) -> None:
        asyncio.run(asyncio.wait_for(test, 3 * WAIT))

    return bounded
