"""uvicorn's HTTP/1.1 connection, with bounds on what a client may send and on how long it may take.

uvicorn keeps a request's head whatever its size and waits for the rest of a request without end. While requests that
were sent ahead wait for their turn it reads no more, so that it misses the client's end; and when it learns of the
end, it tells the last of them alone, not the one that is being answered.
"""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

MAX_HEAD_BYTES = 64 << 10  # of a request's line and headers, or of what stands between pieces of its body
MAX_AHEAD = 64  # requests sent before the answer to an earlier one is complete
MAX_AHEAD_BYTES = 1 << 20  # of their bodies
REQUEST_SECONDS = 120.0  # from the connection's start, or a request's first byte, to the request's last


class Connection(HttpToolsProtocol):
    """One client's connection. Breaking a bound ends it."""

    _head_bytes = 0  # received since the last piece of a body or the last end of a request
    _deadline: asyncio.TimerHandle | None = None  # while a request is awaited or has come in part
    _answering: RequestResponseCycle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._deadline = self.loop.call_later(REQUEST_SECONDS, transport.abort)

    def connection_lost(self, exc: Exception | None) -> None:
        self._clear_deadline()
        if self._answering is not None and not self._answering.response_complete:
            self._answering.disconnected = True
            self._answering.message_event.set()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._head_bytes += len(data)
        super().data_received(data)
        ahead = sum(len(cycle.body) for cycle, _ in self.pipeline)
        if self._head_bytes > MAX_HEAD_BYTES or len(self.pipeline) > MAX_AHEAD or ahead > MAX_AHEAD_BYTES:
            self.transport.abort()
        elif self.pipeline and not self.transport.is_closing():
            self.flow.resume_reading()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._head_bytes = 0
        if self._deadline is None:
            self._deadline = self.loop.call_later(REQUEST_SECONDS, self.transport.abort)

    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        if not self.pipeline:
            self._answering = self.cycle

    def on_body(self, body: bytes) -> None:
        super().on_body(body)
        self._head_bytes = 0

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._head_bytes = 0
        self._clear_deadline()

    def on_response_complete(self) -> None:
        if self.pipeline:
            self._answering = self.pipeline[-1][0]
        super().on_response_complete()

    def _clear_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
