"""The client against servers that a test plays by hand, on real sockets and on both event loops."""

from __future__ import annotations

import asyncio
import shutil
import socket
import ssl
import struct
import subprocess
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import uvloop

from gapless.runtime.core import http_client
from gapless.runtime.core.http_client import HttpClient

WAIT = 20.0
OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"
STREAM = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
Run = Callable[[Awaitable[None]], None]


@pytest.fixture(params=[asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Run:
    """Runs a coroutine to its end on a loop of its own. No callback of the loop may have failed."""

    def run(test: Awaitable[None]) -> None:
        failures: list[dict[str, Any]] = []

        async def bounded() -> None:
            asyncio.get_running_loop().set_exception_handler(lambda _, context: failures.append(context))
            await asyncio.wait_for(test, WAIT)

        with asyncio.Runner(loop_factory=request.param) as runner:
            runner.run(bounded())
        assert failures == []

    return run


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

    def get(self, path: str = "/", **options: Any) -> asyncio.Task[http_client.Response]:
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


def test_what_is_sent(run: Run) -> None:
    async def test() -> None:
        url = "http://127.0.0.1:{port}/base/"
        async with serving(url, headers={"Authorization": "Bearer k", "X-A": "1"}) as service:
            call = asyncio.create_task(
                service.client.request("POST", "/v1/x?a=%20b", b'{"a": 1}', headers={"x-a": "2"})
            )
            peer = await service.accept()
            assert await peer.request() == (
                "POST /base/v1/x?a=%20b HTTP/1.1",
                {
                    "host": f"127.0.0.1:{service.port}",
                    "accept-encoding": "identity",
                    "authorization": "Bearer k",
                    "x-a": "2",
                    "content-length": "8",
                    "content-type": "application/json",
                },
                b'{"a": 1}',
            )
            await peer.send(OK)
            assert (await call).body == b"ok"
            get = service.get("/y")
            first, headers, _ = await peer.request()
            assert (first, "content-length" in headers) == ("GET /base/y HTTP/1.1", False)
            await peer.send(OK)
            await get

    run(test())


RESPONSES = {
    "length": (b"HTTP/1.1 200 OK\r\nX-Y: 1\r\nx-y:  2 \r\nContent-Length: 5\r\n\r\nhello", False),
    "chunked": (b"HTTP/1.1 200 OK\r\nX-Y: 1, 2\r\nTransfer-Encoding: chunked\r\n\r\n"
                b"2\r\nhe\r\n3;ext=1\r\nllo\r\n0\r\nX-Y: a trailer\r\n\r\n", False),
    "until it closes": (b"HTTP/1.1 200 OK\r\nX-Y: 1, 2\r\n\r\nhello", True),
    "HTTP/1.0": (b"HTTP/1.0 200 OK\r\nX-Y: 1, 2\r\n\r\nhello", True),
    "after interim ones": (b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nX-Y: no\r\n\r\n"
                           b"HTTP/1.1 200 OK\r\nX-Y: 1, 2\r\nContent-Length: 5\r\n\r\nhello", False),
}  # fmt: skip


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
@pytest.mark.parametrize("name", RESPONSES)
@pytest.mark.parametrize("streamed", [False, True])
def test_a_response_in_pieces(run: Run, name: str, size: int, streamed: bool) -> None:
    data, closes = RESPONSES[name]
    got: list[tuple[bytes, float]] = []

    async def test() -> None:
        async with serving() as service:
            began = time.perf_counter()
            call = service.stream(lambda *args: got.append(args)) if streamed else service.get()
            peer = await service.accept()
            await peer.answer(*(data[i : i + size] for i in range(0, len(data), size)))
            if closes:
                await peer.close()
            response = await call
            assert (response.status, response.headers["x-y"]) == (200, "1, 2")
            assert (response.body, b"".join(piece for piece, _ in got)) == (
                (b"", b"hello") if streamed else (b"hello", b"")
            )
            times = [at for _, at in got]
            assert times == sorted(times)
            assert all(began < at < time.perf_counter() for at in times)

    run(test())


@pytest.mark.parametrize("method, status", [("HEAD", 200), ("GET", 204), ("GET", 304)])
def test_responses_without_a_body(run: Run, method: str, status: int) -> None:
    async def test() -> None:
        async with serving() as service:
            call = asyncio.create_task(service.client.request(method, "/"))
            peer = await service.accept()
            length = b"content-length: 5\r\n" if status != 204 else b""
            await peer.answer(b"HTTP/1.1 %d X\r\n%b\r\n" % (status, length))
            response = await call
            assert (response.status, response.body) == (status, b"")

    run(test())


def test_connections_are_used_again_the_latest_first(run: Run) -> None:
    async def test() -> None:
        async with serving() as service:
            calls = [service.get(), service.get()]
            peers = [await service.accept(), await service.accept()]
            for peer in peers:  # whoever answers last is used next
                await peer.answer(OK)
            await asyncio.gather(*calls)
            for _ in range(3):
                call = service.get()
                await peers[1].answer(OK)
                await call
            assert service.nobody_else()

    run(test())


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 2\r\n\r\nok",
        b"HTTP/1.0 200 OK\r\ncontent-length: 2\r\n\r\nok",
        OK + OK,
        OK + b"more",
    ],
)
def test_a_connection_that_cannot_go_on_is_closed(run: Run, answer: bytes) -> None:
    async def test() -> None:
        async with serving() as service:
            call = service.get()
            first = await service.accept()
            await first.answer(answer)
            assert (await call).body == b"ok"
            assert await first.gone()
            again = service.get()
            await (await service.accept()).answer(OK)
            assert (await again).body == b"ok"

    run(test())


def test_a_response_that_nobody_asked_for_ends_the_idle_connection(run: Run) -> None:
    async def test() -> None:
        async with serving() as service:
            call = service.get()
            first = await service.accept()
            await first.answer(OK)
            await call
            await first.send(OK)
            assert await first.gone()
            again = service.get()
            await (await service.accept()).answer(b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\nnew")
            assert (await again).body == b"new"

    run(test())


@pytest.mark.parametrize("how", ["close", "reset"])
@pytest.mark.parametrize("then", ["answers", "closes"])
def test_a_reused_connection_that_ends_unanswered_is_tried_once_more(run: Run, how: str, then: str) -> None:
    sent: list[float] = []

    async def test() -> None:
        async with serving() as service:
            call = service.get()
            peer = await service.accept()
            await peer.answer(OK)
            await call
            again = service.stream(lambda *_: None, on_sent=sent.append)
            assert (await peer.request())[0].startswith("POST /s ")
            await peer.end(how)
            fresh = await service.accept()
            if then == "answers":
                await fresh.answer(OK)
                assert (await again).status == 200
            else:
                await fresh.request()
                await fresh.end(how)
                with pytest.raises(ConnectionError, match=r"POST http://127.*/s: .*unanswered"):
                    await again
            assert len(sent) == 2
            assert service.nobody_else()

    run(test())


@pytest.mark.parametrize("sent", [b"HT", STREAM, STREAM + b"5\r\nhel", OK[:-1]])
@pytest.mark.parametrize("how", ["close", "reset"])
def test_a_connection_that_ends_in_mid_response_is_an_error(run: Run, sent: bytes, how: str) -> None:
    async def test() -> None:
        async with serving() as service:
            arrived = asyncio.Event()
            call = service.stream(lambda *_: arrived.set())
            peer = await service.accept()
            await peer.answer(sent)
            if how == "reset" and (b"hel" in sent or sent == OK[:-1]):
                await arrived.wait()  # a reset may overtake what was sent before it
                match = rf"POST http://127.*/s: lost \(.*\) in mid-response, after {len(sent)} bytes"
            else:
                how_it_ended = "closed by the server" if how == "close" else "lost"
                match = f"POST http://127.*/s: {how_it_ended}"
            await peer.end(how)
            with pytest.raises(ConnectionError, match=match):
                await call
            assert service.nobody_else()

    run(test())


@pytest.mark.parametrize(
    "answer, message",
    [
        (b"SSH-2.0-OpenSSH\r\n", "not understood as HTTP/1.1"),
        (b"HTTP/1.1 101 Switching Protocols\r\nupgrade: x\r\nconnection: upgrade\r\n\r\n", "not understood"),
        (STREAM.replace(b"\r\n\r\n", b"\r\ncontent-length: 2\r\n\r\n"), "not understood"),
        (STREAM + b"xyz\r\n", "not understood"),
        (b"HTTP/1.1 200 OK\r\nx: " + b"y" * 70_000, "the head of the response is longer than 65536 bytes"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 99\r\n\r\n" + b"z" * 51, "body .* is longer than 50 bytes"),
    ],
)
def test_an_answer_that_is_no_proper_response(
    run: Run, answer: bytes, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_client, "MAX_BODY_BYTES", 50)

    async def test() -> None:
        async with serving() as service:
            call = service.get("/x")
            peer = await service.accept()
            await peer.answer(answer)
            with pytest.raises(ConnectionError, match=rf"GET http://127.*/x: .*{message}"):
                await call
            assert await peer.gone()

    run(test())


def test_a_refused_connection(run: Run) -> None:
    async def test() -> None:
        async with serving() as service:
            port = service.port
        client = HttpClient(f"http://127.0.0.1:{port}", max_connections=1)
        for _ in range(2):
            with pytest.raises(
                ConnectionError, match=rf"GET http://127.0.0.1:{port}/x: cannot connect: .*111"
            ):
                await client.request("GET", "/x")
        await client.close()

    run(test())


def test_at_most_so_many_at_once_and_the_others_in_order(run: Run) -> None:
    async def test() -> None:
        async with serving(max_connections=2) as service:
            calls = [service.get(f"/{i}") for i in range(6)]
            peers = [await service.accept(), await service.accept()]
            order = []
            for i in range(6):
                order.append((await peers[i % 2].request())[0].split()[1])
                await peers[i % 2].send(OK)
            await asyncio.gather(*calls)
            assert order == [f"/{i}" for i in range(6)]
            assert service.nobody_else()

    run(test())


def test_cancelling_a_call_closes_its_connection_and_lets_the_next_one_in(run: Run) -> None:
    async def test() -> None:
        async with serving(max_connections=1) as service:
            arrived = asyncio.Event()
            running = service.stream(lambda *_: arrived.set())
            waiting, last = service.get("/waiting"), service.get("/last")
            peer = await service.accept()
            await peer.answer(STREAM + b"2\r\nok\r\n")
            await arrived.wait()
            waiting.cancel()
            running.cancel()
            for call in (running, waiting):
                with pytest.raises(asyncio.CancelledError):
                    await call
            assert await peer.gone()
            fresh = await service.accept()
            assert (await fresh.request())[0] == "GET /last HTTP/1.1"
            await fresh.send(OK)
            assert (await last).status == 200

    run(test())


@pytest.mark.parametrize("turns", range(8))
def test_cancelling_a_call_at_any_point_of_its_start_leaves_nothing(run: Run, turns: int) -> None:
    async def test() -> None:
        async with serving(max_connections=1) as service:
            call = service.get()
            for _ in range(turns):
                await asyncio.sleep(0)
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            last = service.get("/last")
            while True:  # connections of the cancelled call may come first, and end
                peer = await service.accept()
                with suppress(asyncio.IncompleteReadError, ConnectionResetError):
                    if (await peer.request())[0] == "GET /last HTTP/1.1":
                        break
            await peer.send(OK)
            assert (await last).status == 200

    run(test())


def test_a_call_that_takes_too_long(run: Run) -> None:
    """The wait for a turn is part of its time."""

    async def test() -> None:
        async with serving(max_connections=1) as service:
            slow = service.stream(lambda *_: None, timeout=0.2)
            peer = await service.accept()
            waiting = service.get("/y", timeout=0.01)
            await peer.answer(STREAM + b"2\r\nok\r\n")
            with pytest.raises(TimeoutError, match=r"GET http://127.*/y: not answered in full within 0.01 s"):
                await waiting
            with pytest.raises(TimeoutError, match=r"POST http://127.*/s: not answered in full within 0.2 s"):
                await slow
            assert await peer.gone()

    run(test())


def test_a_server_that_does_not_finish_the_connection(run: Run) -> None:
    """Here it owes the TLS handshake."""

    async def test() -> None:
        async with serving("https://127.0.0.1:{port}", connect_timeout=0.05) as service:
            call = service.get()
            peer = await service.accept()
            with pytest.raises(TimeoutError, match=r"GET https://127.*/: no connection within 0.05 s"):
                await call
            assert (await peer.reader.read())[:1] == b"\x16"  # its hello, then the end

    run(test())


def test_the_body_of_an_error_is_kept(run: Run) -> None:
    got: list[bytes] = []

    async def test() -> None:
        async with serving() as service:
            call = service.stream(lambda piece, _: got.append(piece))
            await (await service.accept()).answer(
                b"HTTP/1.1 503 Busy\r\nretry-after: 1\r\ncontent-length: 4\r\n\r\nbusy"
            )
            response = await call
            assert (response.status, response.headers["retry-after"], response.body) == (503, "1", b"busy")

    run(test())
    assert got == []


@pytest.mark.parametrize("error", [KeyError("mine"), TimeoutError("mine"), ConnectionError("mine")])
def test_what_on_data_raises_fails_its_own_call_alone(run: Run, error: Exception) -> None:
    def fail(piece: bytes, at: float) -> None:
        pieces.append(piece)
        raise error

    pieces: list[bytes] = []
    got: list[bytes] = []

    async def test() -> None:
        async with serving() as service:
            bad = service.stream(fail, timeout=WAIT)
            bad_peer = await service.accept()
            good = service.stream(lambda piece, _: got.append(piece))
            good_peer = await service.accept()
            await good_peer.answer(STREAM, b"1\r\na\r\n")
            await bad_peer.answer(STREAM + b"1\r\na\r\n1\r\nb\r\n")
            with pytest.raises(type(error), match="mine"):
                await bad
            assert await bad_peer.gone()
            await good_peer.send(b"1\r\nb\r\n0\r\n\r\n")
            assert (await good).status == 200

    run(test())
    assert (b"".join(pieces), b"".join(got)) == (b"a", b"ab")


def test_closing_the_client_fails_its_calls(run: Run) -> None:
    async def test() -> None:
        async with serving() as service:
            idle, busy = service.get("/idle"), None
            peer = await service.accept()
            busy = service.get("/busy")
            other = await service.accept()
            await peer.answer(OK)
            await idle
            await other.request()
            await service.client.close()
            with pytest.raises(ConnectionError, match="/busy: the client was closed"):
                await busy
            assert await peer.gone()
            assert await other.gone()
            with pytest.raises(ConnectionError, match="the client is closed"):
                await service.client.request("GET", "/")
            await service.client.close()

    run(test())


def test_a_long_body_and_an_answer_that_does_not_wait_for_it(run: Run) -> None:
    async def test() -> None:
        async with serving() as service:
            body = bytes(range(256)) * (1 << 15)
            whole = asyncio.create_task(service.client.request("POST", "/", body))
            peer = await service.accept()
            assert (await peer.request())[2] == body
            await peer.send(OK)
            await whole
            early = asyncio.create_task(service.client.request("POST", "/", body * 4))
            await peer.reader.readuntil(b"\r\n\r\n")
            await peer.send(b"HTTP/1.1 413 Too Large\r\ncontent-length: 0\r\n\r\n")
            assert (await early).status == 413
            again = service.get()
            await (await service.accept()).answer(OK)
            await again

    run(test())


def test_many_calls_over_few_connections(run: Run) -> None:
    async def test() -> None:
        async def serve() -> None:
            while True:
                peer = await service.accept()
                peers.append(asyncio.create_task(echo(peer)))

        async def echo(peer: Peer) -> None:
            with suppress(asyncio.IncompleteReadError):
                while True:
                    _, _, body = await peer.request()
                    peer.writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body))

        peers: list[asyncio.Task[None]] = []
        async with serving(max_connections=8) as service:
            server = asyncio.create_task(serve())
            bodies = [b"%d" % i for i in range(2000)]
            answers = await asyncio.gather(*(service.client.request("POST", "/", body) for body in bodies))
            assert [answer.body for answer in answers] == bodies
            assert len(peers) == 8
            server.cancel()
        await asyncio.gather(*peers)

    run(test())


def test_small_requests_are_not_held_back(run: Run) -> None:
    async def test() -> None:
        async with serving() as service:
            call = service.get()
            await (await service.accept()).answer(OK)
            await call
            (connection,) = service.client._connections
            assert connection._transport is not None
            sock = connection._transport.get_extra_info("socket")
            assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)

    run(test())


def test_ipv6(run: Run) -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError as error:
        pytest.skip(f"no IPv6 here: {error}")

    async def test() -> None:
        async with serving("http://[::1]:{port}") as service:
            call = service.get()
            peer = await service.accept()
            assert (await peer.request())[1]["host"] == f"[::1]:{service.port}"
            await peer.send(OK)
            assert (await call).body == b"ok"

    run(test())


@pytest.mark.skipif(shutil.which("openssl") is None, reason="makes its certificate with openssl")
@pytest.mark.parametrize("trusted", [True, False])
def test_https(run: Run, trusted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key, cert = tmp_path / "key.pem", tmp_path / "cert.pem"
    command = (
        "openssl req -x509 -newkey rsa:2048 -nodes -days 1 -subj /CN=here -addext subjectAltName=IP:127.0.0.1"
    )
    subprocess.run(
        [*command.split(), "-keyout", key, "-out", cert], check=True, capture_output=True, timeout=60
    )
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(cert, key)
    if trusted:
        monkeypatch.setenv("SSL_CERT_FILE", str(cert))

    async def test() -> None:
        async with serving("https://127.0.0.1:{port}", tls) as service:
            call = service.get()
            if not trusted:
                with pytest.raises(ConnectionError, match=r"cannot connect: .*certificate verify failed"):
                    await call
                return
            peer = await service.accept()
            await peer.answer(OK)
            assert (await call).body == b"ok"
            stream = service.stream(lambda *_: None)
            await peer.answer(STREAM + b"2\r\nok\r\n")
            stream.cancel()
            assert await peer.gone()

    run(test())


@pytest.mark.parametrize(
    "url, message",
    [
        ("localhost:8000", "not a URL of the form"),
        ("ftp://host", "not a URL of the form"),
        ("http://", "not a URL of the form"),
        ("http://host:port", "not a URL: .*port"),
        ("http://host:70000", "not a URL: .*range"),
        ("http://[::1", "not a URL"),
        ("http://user:secret@host", "no user"),
        ("http://host/?a=1", "no query"),
        ("http://host/#a", "no fragment"),
        ("http://bücher.example", "in ASCII"),
        ("http://host/a b", "percent-encode"),
    ],
)
def test_a_wrong_url_is_named(url: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        HttpClient(url)


@pytest.mark.parametrize(
    "method, path, headers, message",
    [
        ("GET /", "/", {}, "'GET /' is not an HTTP method"),
        ("GET", "x", {}, "'x' is not a path"),
        ("GET", "/ HTTP/1.1\r\nx: y", {}, "is not a path"),
        ("GET", "/ü", {}, "is not a path"),
        ("GET", "/", {"x": "a\r\nb: c"}, "header 'x'"),
        ("GET", "/", {"x y": "a"}, "header 'x y'"),
        ("GET", "/", {"x": "中"}, "header 'x'"),
    ],
)
def test_a_wrong_request_is_named(
    run: Run, method: str, path: str, headers: dict[str, str], message: str
) -> None:
    async def test() -> None:
        with pytest.raises(ValueError, match=message):
            await HttpClient("http://127.0.0.1:1").request(method, path, headers=headers)

    run(test())


def test_wrong_options_are_named() -> None:
    with pytest.raises(ValueError, match="max_connections is 0"):
        HttpClient("http://host", max_connections=0)
    with pytest.raises(ValueError, match="header 'x'"):
        HttpClient("http://host", headers={"x": "\n"})
