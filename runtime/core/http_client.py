"""An HTTP/1.1 client for many calls at once: streams whose bytes are dated as they come, and a pool of connections.

One event loop, no redirects, no content encodings. Bytes go from the socket through llhttp (httptools) to the caller
without a task switch between.
"""

from __future__ import annotations

import asyncio
import re
import ssl
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field
from time import perf_counter
from typing import cast
from urllib.parse import SplitResult, urlsplit

import httptools

MAX_HEAD_BYTES = 1 << 16  # of a response's status line and headers
MAX_BODY_BYTES = 1 << 28  # of a body that is kept
_TOKEN = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")  # RFC 9110: a method, a header's name
_TARGET = re.compile(r"/[!-~]*")
_VALUE = re.compile(r"[\t -~\x80-\xff]*")


@dataclass(frozen=True, slots=True)
class Response:
    """Names of headers are in lower case; values of one name are joined by commas."""

    status: int
    headers: dict[str, str]
    body: bytes


class HttpClient:
    """Calls to one server, `http(s)://host[:port][/base/path]`; ValueError where `url` is none.

    At most `max_connections` calls run at once, the others wait in order. A connection is used again where the server
    keeps it open, the latest first. Where the server has closed it meanwhile, before any byte of the response, the
    request is sent once more on a new one.

    A call raises ConnectionError (refused, reset, closed in mid-response, not HTTP), or TimeoutError; `timeout` is in
    seconds and for the whole call, the wait for a connection included. Cancelling a call closes its connection, by
    which a server learns of it. A body without a content-type is sent as JSON.
    """

    def __init__(
        self,
        url: str,
        *,
        headers: Mapping[str, str] | None = None,
        max_connections: int | None = None,
        connect_timeout: float = 10.0,
    ) -> None:
        parts, self._host, self._port = _parse_url(url)
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._base = parts.path.rstrip("/")
        self._origin = f"{parts.scheme}://{parts.netloc}"
        self._headers = {"host": parts.netloc, "accept-encoding": "identity"} | _checked(headers)
        if max_connections is not None and max_connections < 1:
            raise ValueError(f"max_connections is {max_connections}: must be at least 1")
        self._turns: AbstractAsyncContextManager[object] = (
            asyncio.Semaphore(max_connections) if max_connections else nullcontext()
        )
        self._connect_timeout = connect_timeout
        self._idle: dict[_Connection, None] = {}  # the latest last
        self._connections: set[_Connection] = set()
        self._closed = False

    async def request(
        self,
        method: str,
        path: str,
        body: bytes = b"",
        *,
        headers: Mapping[str, str] | None = None,
        timeout: float | None = None,
    ) -> Response:
        """`path` follows the URL's own path; it begins with a slash and may have a query."""
        return await self._call(_Exchange(method, self._url(path), None, None), path, body, headers, timeout)

    async def stream(
        self,
        method: str,
        path: str,
        body: bytes = b"",
        *,
        on_data: Callable[[bytes, float], None],
        on_sent: Callable[[float], None] | None = None,
        headers: Mapping[str, str] | None = None,
        timeout: float | None = None,
    ) -> Response:
        """As `request`, but `on_data(piece, at)` gets the body of a 2xx response piece by piece, and it is not kept.

        `at` is `time.perf_counter()` when the socket's bytes were read. `on_sent(at)` says when the request goes to
        the socket, twice where it is sent once more. What either raises ends this call and is raised by it.
        """
        exchange = _Exchange(method, self._url(path), on_data, on_sent)
        return await self._call(exchange, path, body, headers, timeout)

    async def close(self) -> None:
        """Closes all connections; calls that still run fail. Returns when they are closed."""
        self._closed = True
        lost = [connection.lost for connection in self._connections]
        for connection in list(self._connections):
            connection.fail("the client was closed")
        await asyncio.gather(*lost)

    def _url(self, path: str) -> str:
        return self._origin + self._base + path

    async def _call(
        self,
        exchange: _Exchange,
        path: str,
        body: bytes,
        headers: Mapping[str, str] | None,
        timeout: float | None,
    ) -> Response:
        data = self._request(exchange.method, path, body, headers)
        try:
            async with asyncio.timeout(timeout) as limit, self._turns:
                await self._perform(exchange, data)
        except TimeoutError:
            if limit.expired():
                raise TimeoutError(f"{exchange}: not answered in full within {timeout:g} s") from None
            raise
        return Response(exchange.status, exchange.headers, bytes(exchange.body))

    async def _perform(self, exchange: _Exchange, data: bytes) -> None:
        if self._idle:
            connection, _ = self._idle.popitem()
            try:
                await self._send(connection, exchange, data)
                return
            except ConnectionError:
                if exchange.arrived:
                    raise
                exchange.error = None
        await self._send(await self._connect(exchange), exchange, data)

    async def _send(self, connection: _Connection, exchange: _Exchange, data: bytes) -> None:
        try:
            await connection.run(exchange, data)
        finally:
            if connection.reusable and not self._closed:
                self._idle[connection] = None
            else:
                connection.abort()
        if exchange.error is not None:
            try:
                raise exchange.error
            finally:
                exchange.error = None  # it knows this frame: a cycle

    async def _connect(self, exchange: _Exchange) -> _Connection:
        loop = asyncio.get_running_loop()
        connection = _Connection(loop, self)
        try:
            if self._closed:
                raise ConnectionError("the client is closed")
            async with asyncio.timeout(self._connect_timeout) as limit:
                await loop.create_connection(lambda: connection, self._host, self._port, ssl=self._tls)
        except BaseException as error:
            connection.abort()
            connection.connection_lost(None)  # uvloop does not say it of one that was cancelled as it opened
            if isinstance(error, TimeoutError) and limit.expired():
                raise TimeoutError(f"{exchange}: no connection within {self._connect_timeout:g} s") from None
            if isinstance(error, OSError):
                raise ConnectionError(f"{exchange}: cannot connect: {error}") from error
            raise
        return connection

    def connected(self, connection: _Connection) -> None:
        self._connections.add(connection)
        if self._closed:
            connection.abort()

    def disconnected(self, connection: _Connection) -> None:
        self._connections.discard(connection)
        self._idle.pop(connection, None)

    def _request(self, method: str, path: str, body: bytes, headers: Mapping[str, str] | None) -> bytes:
        if not _TOKEN.fullmatch(method):
            raise ValueError(f"{method!r} is not an HTTP method")
        if not _TARGET.fullmatch(path):
            raise ValueError(f"{path!r} is not a path: it must begin with / and be percent-encoded")
        fields = self._headers | _checked(headers)
        if body or method in ("POST", "PUT", "PATCH"):
            fields["content-length"] = str(len(body))
            fields.setdefault("content-type", "application/json")
        lines = [f"{method} {self._base}{path} HTTP/1.1", *(f"{k}: {v}" for k, v in fields.items()), "", ""]
        return "\r\n".join(lines).encode("latin-1") + body


@dataclass(slots=True)
class _Exchange:
    """One request and what has come of its response."""

    method: str
    url: str
    on_data: Callable[[bytes, float], None] | None
    on_sent: Callable[[float], None] | None
    arrived: int = 0  # bytes of the response, its head included
    status: int = 0  # 0: the head has not come
    headers: dict[str, str] = field(default_factory=dict)
    body: bytearray = field(default_factory=bytearray)
    error: Exception | None = None

    def __str__(self) -> str:
        return f"{self.method} {self.url}"


class _Connection(asyncio.Protocol):
    """Carries one exchange at a time. The methods in the second half are llhttp's, called within `data_received`."""

    def __init__(self, loop: asyncio.AbstractEventLoop, client: HttpClient) -> None:
        self.reusable = False
        self.lost = loop.create_future()
        self._loop, self._client = loop, client
        self._transport: asyncio.Transport | None = None
        self._aborted = False
        self._parser = httptools.HttpResponseParser(self)
        self._exchange: _Exchange | None = None  # until it has ended
        self._done = self.lost  # of the exchange
        self._sink: Callable[[bytes, float], None] | None = None  # of the response's body
        self._keep_alive = False
        self._at = 0.0  # when the bytes that are being parsed were read

    async def run(self, exchange: _Exchange, data: bytes) -> None:
        """Returns when the response is complete or `exchange.error` says why it is not."""
        self.reusable = False
        self._exchange, self._done = exchange, self._loop.create_future()
        if self._transport is None or self.lost.done():
            self.fail("closed by the server before it was asked")
        else:
            if exchange.on_sent is not None:
                exchange.on_sent(perf_counter())
            self._transport.write(data)
        await self._done

    def abort(self) -> None:
        """Closes the connection at once. It may not even be open yet."""
        self._aborted = True
        self.reusable = False
        self._exchange = None
        if self._transport is not None:
            self._transport.abort()

    def fail(self, reason: str) -> None:
        """Ends the exchange, if there is one, and the connection."""
        if self._exchange is not None:
            self._end(ConnectionError(f"{self._exchange}: {reason}"))
        self.abort()

    def _end(self, error: Exception | None) -> None:
        if self._exchange is not None:
            self._exchange.error = error
            self._exchange = self._sink = None
        if not self._done.done():  # else its task has been cancelled
            self._done.set_result(None)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(0)  # uvloop then writes at once, not at the end of its turn
        self._client.connected(self)
        if self._aborted:
            self._transport.abort()

    def data_received(self, data: bytes) -> None:
        self._at = perf_counter()
        exchange = self._exchange
        if exchange is None:
            self.abort()  # nobody has asked
            return
        exchange.arrived += len(data)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self.fail(f"the server's answer is not understood as HTTP/1.1: {error}")
        if exchange.status == 0 and exchange.arrived > MAX_HEAD_BYTES:
            self.fail(f"the head of the response is longer than {MAX_HEAD_BYTES} bytes")

    def connection_lost(self, error: Exception | None) -> None:
        if self.lost.done():
            return
        self._client.disconnected(self)
        self.lost.set_result(None)
        del self._parser  # it knows this connection: a cycle
        exchange = self._exchange
        if exchange is None:
            self.reusable = False
        elif error is None and _ends_with_connection(exchange):
            self._end(None)
        else:
            how = f"lost ({error})" if error else "closed by the server"
            where = "in mid-response" if exchange.arrived else "unanswered"
            self.fail(f"{how} {where}")

    def on_message_begin(self) -> None:
        if self._exchange is None:
            self.abort()  # a second response to one request

    def on_header(self, name: bytes, value: bytes) -> None:
        exchange = self._exchange
        if exchange is not None and exchange.status == 0:  # else a trailer
            key, text = name.decode("latin-1").lower(), value.decode("latin-1").rstrip(" \t")
            seen = exchange.headers.get(key)
            exchange.headers[key] = text if seen is None else f"{seen}, {text}"

    def on_headers_complete(self) -> None:
        exchange = self._exchange
        if exchange is None:
            return
        exchange.status = status = self._parser.get_status_code()
        self._keep_alive = self._parser.should_keep_alive()
        self._sink = exchange.on_data if 200 <= status < 300 else None
        if exchange.method == "HEAD" and status >= 200:
            self._end(None)  # not reusable: the parser waits for the body that the headers speak of

    def on_body(self, piece: bytes) -> None:
        exchange = self._exchange
        if exchange is None:
            return  # an earlier piece has ended it
        if self._sink is None:
            exchange.body += piece
            if len(exchange.body) > MAX_BODY_BYTES:
                self.fail(f"the body of the response is longer than {MAX_BODY_BYTES} bytes")
            return
        try:
            self._sink(piece, self._at)
        except Exception as error:
            self._end(error)
            self.abort()

    def on_message_complete(self) -> None:
        exchange = self._exchange
        if exchange is None:
            return
        if exchange.status < 200:  # an interim response: the real one follows
            exchange.status = 0
            exchange.headers.clear()
            return
        assert self._transport is not None
        self.reusable = self._keep_alive and not self._transport.get_write_buffer_size()
        self._end(None)


def _ends_with_connection(exchange: _Exchange) -> bool:
    """RFC 9112, 6.3: a response that says nothing of its length ends where the connection does."""
    return exchange.status >= 200 and exchange.headers.keys().isdisjoint(
        ("content-length", "transfer-encoding")
    )


def _parse_url(url: str) -> tuple[SplitResult, str, int]:
    """The URL's parts, its host and its port."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise ValueError(f"{url!r} is not a URL: {error}") from None
    if parts.scheme not in ("http", "https") or not host:
        raise ValueError(f"{url!r} is not a URL of the form http(s)://host[:port][/path]")
    if parts.query or parts.fragment or parts.username is not None:
        raise ValueError(f"a server's URL has no user, no query and no fragment (of {host})")
    if not _TARGET.fullmatch(f"/{parts.netloc}{parts.path}"):
        raise ValueError(f"{url!r}: write the host in ASCII and percent-encode the path")
    return parts, host, port or (443 if parts.scheme == "https" else 80)


def _checked(headers: Mapping[str, str] | None) -> dict[str, str]:
    """With names in lower case. Raises ValueError for what would not arrive as it is."""
    checked = {}
    for name, value in (headers or {}).items():
        if not _TOKEN.fullmatch(name) or not _VALUE.fullmatch(value):
            raise ValueError(f"header {name!r} has a character that headers may not have")
        checked[name.lower()] = value
    return checked
