"""JSON over HTTP to one server, its failures as BackendError."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncGenerator, Mapping
from functools import partial
from typing import Any

from gapless.frontend.backends.base import BackendError
from gapless.runtime.core.http_client import HttpClient, Response
from gapless.runtime.core.sse import EventParser

MAX_CONNECTIONS = 256  # more calls than these wait for their turn


class JsonClient:
    """Belongs to the event loop on which it is first used, in a forked process to another one there."""

    def __init__(self, url: str, api_key: str | None = None, timeout: float | None = None) -> None:
        """`timeout` in seconds, for a whole call. Raises ValueError where `url` is none."""
        self.url = url.rstrip("/")
        headers = {"authorization": f"Bearer {api_key}"} if api_key else None
        self._open = partial(HttpClient, self.url, headers=headers, max_connections=MAX_CONNECTIONS)
        self._clients = {os.getpid(): self._open()}  # a forked process leaves its parent's connections alone
        self._timeout = timeout

    async def call(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """The answer; BackendError has the server's message and status. Cancelling it closes the connection."""
        try:
            response = await self._client.request(method, path, _encoded(body), timeout=self._timeout)
        except OSError as error:
            raise BackendError(str(error)) from error
        self._check(response, path)
        return self._decoded(response.body, path)

    async def events(self, path: str, body: Mapping[str, Any]) -> AsyncGenerator[Any, None]:
        """The events of a streamed answer up to [DONE]. Closing this closes the connection."""
        arrived: asyncio.Queue[bytes | None] = asyncio.Queue()
        parser = EventParser()

        def take(piece: bytes, at: float) -> None:
            for payload in parser.feed(piece):
                arrived.put_nowait(payload)

        async def read() -> Response:
            try:
                return await self._client.stream(
                    "POST", path, _encoded(body), on_data=take, timeout=self._timeout
                )
            finally:
                arrived.put_nowait(None)

        reading = asyncio.create_task(read())
        try:
            done = False
            while (payload := await arrived.get()) is not None:
                if payload == b"[DONE]":
                    done = True
                elif not done:
                    yield self._event(payload, path)
            self._check(await reading, path)
            if not done:
                raise BackendError(f"{self.url}{path}: the stream ended without its last event")
        except (OSError, ValueError) as error:
            raise BackendError(str(error)) from error
        finally:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)

    async def close(self) -> None:
        await self._client.close()

    @property
    def _client(self) -> HttpClient:
        process = os.getpid()
        if process not in self._clients:
            self._clients[process] = self._open()
        return self._clients[process]

    def _check(self, response: Response, path: str) -> None:
        if not 200 <= response.status < 300:
            message = _message(response.body)
            raise BackendError(f"{self.url}{path} answered {response.status}: {message}", response.status)

    def _event(self, payload: bytes, path: str) -> Any:
        event = self._decoded(payload, path)
        if isinstance(event, dict) and event.get("error"):
            error = event["error"]
            raise BackendError(f"{self.url}{path}: {_message(payload)}", _status(error))
        return event

    def _decoded(self, data: bytes, path: str) -> Any:
        try:
            return json.loads(data)
        except ValueError as error:
            raise BackendError(f"{self.url}{path}: the answer is not JSON: {data[:80]!r}") from error


def _encoded(body: Mapping[str, Any] | None) -> bytes:
    return b"" if body is None else json.dumps(body, separators=(",", ":")).encode()


def _message(body: bytes) -> str:
    """What an error body says: `{"error": {"message": ...}}` as ours and OpenAI's, or one of its relatives."""
    text = body.decode(errors="replace")
    try:
        content = json.loads(text)
    except ValueError:
        return text[:500] or "nothing"
    for name in ("error", "message", "detail"):
        if isinstance(content, dict) and content.get(name):
            content = content[name]
    return content if isinstance(content, str) else json.dumps(content)


def _status(error: Any) -> int | None:
    """OpenAI's relatives have the HTTP status as an error's code in a stream."""
    code = error.get("code") if isinstance(error, dict) else None
    return code if type(code) is int else None
