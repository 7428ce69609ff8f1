"""The client and servers that misbehave, calls that are cancelled, callers that fail: each call's end is its own."""

from __future__ import annotations

import asyncio
import gc
import weakref
from contextlib import suppress
from functools import partial

import pytest
from http_peer import LOOPS, OK, STREAM, WAIT, Run, run_on, serving

from gapless.runtime.core import http_client
from gapless.runtime.core.http_client import HttpClient


@pytest.fixture(params=LOOPS)
def run(request: pytest.FixtureRequest) -> Run:
    return partial(run_on, request.param)


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
                match = r"POST http://127.*/s: lost \(.*\) in mid-response"
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
            slow = service.stream(lambda *_: None, timeout=0.5)
            peer = await service.accept()
            waiting = service.get("/y", timeout=0.01)
            await peer.answer(STREAM + b"2\r\nok\r\n")
            with pytest.raises(TimeoutError, match=r"GET http://127.*/y: not answered in full within 0.01 s"):
                await waiting
            with pytest.raises(TimeoutError, match=r"POST http://127.*/s: not answered in full within 0.5 s"):
                await slow
            assert await peer.gone()

    run(test())


def test_a_server_that_does_not_finish_the_connection(run: Run) -> None:
    """Here it owes the TLS handshake."""

    async def test() -> None:
        async with serving("https://127.0.0.1:{port}", connect_timeout=0.3) as service:
            call = service.get()
            peer = await service.accept()
            with pytest.raises(TimeoutError, match=r"GET https://127.*/: no connection within 0.3 s"):
                await call
            assert (await peer.reader.read())[:1] == b"\x16"  # its hello, then the end

    run(test())


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


def test_nothing_of_a_failed_call_waits_for_the_collector(run: Run) -> None:
    """A client that turns the collector off while it measures would keep each request that fails."""

    class Sink:
        def __call__(self, data: bytes, at: float) -> None: ...

    async def test() -> None:
        async with serving() as service:

            async def answer() -> None:
                peer = await service.accept()
                await peer.answer(STREAM)
                await peer.end("close")

            answering = asyncio.create_task(answer())
            sink = Sink()
            kept = weakref.ref(sink)
            with suppress(ConnectionError):
                await service.client.stream("POST", "/s", on_data=sink)
            await answering
            del sink
            assert kept() is None

    gc.collect()
    gc.disable()
    try:
        run(test())
    finally:
        gc.enable()
