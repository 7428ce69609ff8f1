"""A server that a test plays by hand, on real sockets, and the client under test beside it."""

from __future__ import annotations

import asyncio
import socket
import ssl
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import uvloop

from gapless.runtime.core.http_client import HttpClient, Response

WAIT = 20.0
OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"
STREAM = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
LOOPS = {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}
Run = Callable[[Awaitable[None]], None]


def run_on(loop: str, test: Awaitable[None]) -> None:
    """Runs a coroutine to its end on a loop of its own. No callback of the loop may have failed."""
    failures: list[dict[str, Any]] = []

    async def bounded() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: failures.append(context))
        await asyncio.wait_for(test, WAIT)

    with asyncio.Runner(loop_factory=LOOPS[loop]) as runner:
        runner.run(bounded())
    assert failures == []


class Peer:
    """The server's end of one connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def request(self) -> tuple[str, dict[str, str], bytes]:
        """The next request: its first line, its headers, its body."""
        head = (await self.reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        first, *lines = head.rstrip("\r\n").split("\r\n")
        headers = dict(line.split(": ", 1) for line in lines)
        return first, headers, await self.reader.readexactly(int(headers.get("content-length", 0)))

    async def answer(self, *pieces: bytes) -> None:
        """Takes the next request and answers it."""
        await self.request()
        await self.send(*pieces)

    async def send(self, *pieces: bytes) -> None:
        """Each piece goes out by itself; where the loop is quick, it arrives by itself."""
        for piece in pieces:
            self.writer.write(piece)
            for _ in range(3):
                await asyncio.sleep(0)

    async def gone(self) -> bool:
        """True when the client closes the connection without another byte."""
        with suppress(ConnectionResetError):
            return await self.reader.read() == b""
        return True

    async def close(self) -> None:
        self.writer.close()
        with suppress(ConnectionError):
            await self.writer.wait_closed()

    async def end(self, how: str) -> None:
        if how == "reset":
            sock = self.writer.get_extra_info("socket")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.writer.transport.abort()
        await self.close()


class Service:
    """A listening server, and a client of it."""

    def __init__(self, client: HttpClient, peers: asyncio.Queue[Peer], port: int) -> None:
        self.client, self._peers, self.port = client, peers, port

    async def accept(self) -> Peer:
        return await self._peers.get()

    def nobody_else(self) -> bool:
        return self._peers.empty()

    def get(self, path: str = "/", **options: Any) -> asyncio.Task[Response]:
        return asyncio.create_task(self.client.request("GET", path, **options))

    def stream(self, on_data: Callable[[bytes, float], None], **options: Any) -> asyncio.Task[Any]:
        return asyncio.create_task(self.client.stream("POST", "/s", b"{}", on_data=on_data, **options))


@asynccontextmanager
async def serving(
    url: str = "http://127.0.0.1:{port}", tls: ssl.SSLContext | None = None, **options: Any
) -> AsyncIterator[Service]:
    peers: asyncio.Queue[Peer] = asyncio.Queue()
    seen: list[Peer] = []

    def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen.append(Peer(reader, writer))
        peers.put_nowait(seen[-1])

    host = "::1" if "::1" in url else "127.0.0.1"
    server = await asyncio.start_server(connected, host, 0, ssl=tls)
    port = server.sockets[0].getsockname()[1]
    client = HttpClient(url.format(port=port), **options)
    try:
        yield Service(client, peers, port)
    finally:
        await client.close()
        server.close()
        for peer in seen:
            await peer.close()
        await server.wait_closed()
