"""What the client sends and reads, on real sockets and on both event loops."""

from __future__ import annotations

import asyncio
import shutil
import socket
import ssl
import subprocess
import time
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest
from http_peer import LOOPS, OK, STREAM, Peer, Run, run_on, serving

from gapless.runtime.core import http_client
from gapless.runtime.core.http_client import HttpClient


@pytest.fixture(params=LOOPS)
def run(request: pytest.FixtureRequest) -> Run:
    return partial(run_on, request.param)


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


def test_a_request_is_sent_when_it_is_handed_to_the_socket(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not when that returns: a server on a busy machine may have answered by then."""
    handed: list[float] = []
    connection_made = http_client._Connection.connection_made

    class Watched:
        def __init__(self, transport: asyncio.Transport) -> None:
            self._transport = transport

        def __getattr__(self, name: str) -> object:
            return getattr(self._transport, name)

        def write(self, data: bytes) -> None:
            handed.append(time.perf_counter())
            self._transport.write(data)

    monkeypatch.setattr(
        http_client._Connection, "connection_made", lambda self, made: connection_made(self, Watched(made))
    )

    async def test() -> None:
        sent: list[float] = []
        async with serving() as service:
            call = service.stream(lambda *_: None, on_sent=sent.append)
            await (await service.accept()).answer(OK)
            await call
        assert [at < before for at, before in zip(sent, handed, strict=True)] == [True]

    run(test())
