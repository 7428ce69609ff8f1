"""What a client may send and how long it may take, without harm to others."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from gapless.runtime.core.messages import Abort, Finish, Submit
from gapless.tokenizer_manager import connection

WAIT = 20
GET = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"


def post(**fields: Any) -> bytes:
    body = msgspec.json.encode(fields)
    return b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body


async def until_closed(reader: asyncio.StreamReader) -> bytes:
    try:
        return await asyncio.wait_for(reader.read(), WAIT)
    except ConnectionError:
        return b""


@pytest.mark.parametrize(
    ("start", "more"),
    [
        (b"GET /health HTTP/1.1\r\n", b"A: b\r\n" * 1000),
        (b"GET /health HTTP/1.1\r\nA: ", b"b" * 6000),
        (b"GET /", b"b" * 6000),
        (b"POST /health HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nx\r\n0\r\n", b"A: b\r\n" * 1000),
    ],
)
def test_a_head_without_end_is_cut(run: Any, on_a_socket: Any, start: bytes, more: bytes) -> None:
    """Header after header, or one that never ends, before the body or after it: memory stays as it was."""

    async def test() -> None:
        async with on_a_socket() as service:
            reader, writer = await asyncio.open_connection("127.0.0.1", service.port)
            writer.write(start)
            with pytest.raises(ConnectionError):
                for _ in range(10_000):
                    writer.write(more)
                    await writer.drain()
            await until_closed(reader)
            writer.close()

    run(test())


def test_a_body_in_tiny_chunks_is_no_head(run: Any, on_a_socket: Any) -> None:
    async def test() -> None:
        async with on_a_socket(max_body_bytes=1 << 20) as service:
            _, writer = await asyncio.open_connection("127.0.0.1", service.port)
            writer.write(b"POST /generate HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
            for byte in msgspec.json.encode({"text": "a", "ignored": "x" * 100_000}):
                writer.write(b"1\r\n%c\r\n" % byte)
                await writer.drain()
            writer.write(b"0\r\n\r\n")
            assert (await service.engine.take(Submit)).params.max_new_tokens > 0
            writer.close()
            await service.engine.take(Abort)

    run(test())


@pytest.mark.parametrize("sent", [b"", GET[:-3], post(text="a")[:-3], GET + GET[:-3]])
def test_a_request_that_does_not_come_is_not_waited_for(
    run: Any, on_a_socket: Any, sent: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Idle from the start, or stuck in the head or the body: the connection ends and its descriptor is free."""

    async def test() -> None:
        async with on_a_socket() as service:
            reader, writer = await asyncio.open_connection("127.0.0.1", service.port)
            writer.write(sent)
            await until_closed(reader)
            writer.close()
            assert len(service.front.registry) == 0

    monkeypatch.setattr(connection, "REQUEST_SECONDS", 0.2)
    run(test())


def test_an_answer_may_take_longer_than_a_request(
    run: Any, on_a_socket: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test() -> None:
        async with on_a_socket() as service:
            reader, writer = await asyncio.open_connection("127.0.0.1", service.port)
            writer.write(post(text="a"))
            uid = (await service.engine.take(Submit)).uid
            await asyncio.sleep(0.5)
            service.engine.gain(uid, "x", [1], Finish.LENGTH)
            assert b"200 OK" in await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), WAIT)
            writer.close()

    monkeypatch.setattr(connection, "REQUEST_SECONDS", 0.2)
    run(test())


@pytest.mark.parametrize("ahead", [GET, post(text="b"), post(text="b" * 100_000), GET * 20])
def test_a_client_that_sent_ahead_and_goes_is_noticed(run: Any, on_a_socket: Any, ahead: bytes) -> None:
    """The request that is being answered is aborted, those behind it never start."""

    async def test() -> None:
        async with on_a_socket() as service:
            _, writer = await asyncio.open_connection("127.0.0.1", service.port)
            writer.write(post(text="a"))
            uid = (await service.engine.take(Submit)).uid
            writer.write(ahead)
            await writer.drain()
            writer.close()
            assert (await service.engine.take(Abort)).uid == uid
            service.engine.gain(uid, finish=Finish.ABORT)
            await asyncio.wait_for(service.front.registry.idle.wait(), WAIT)
            assert len(service.engine.sent) == 2

    run(test())


def test_requests_sent_ahead_are_answered_in_order(run: Any, on_a_socket: Any) -> None:
    async def test() -> None:
        async with on_a_socket() as service:
            reader, writer = await asyncio.open_connection("127.0.0.1", service.port)
            writer.write(post(text="a", rid="first") + post(text="b", rid="second") + GET)
            for rid in (b"first", b"second"):
                service.engine.gain((await service.engine.take(Submit)).uid, "x", [1], Finish.LENGTH)
                await asyncio.wait_for(reader.readuntil(rid), WAIT)
            await asyncio.wait_for(reader.readuntil(b'"status"'), WAIT)
            writer.close()

    run(test())


@pytest.mark.parametrize("ahead", [GET * 1000, post(text="b" * 50_000)])
def test_more_sent_ahead_than_is_kept_ends_the_connection(run: Any, on_a_socket: Any, ahead: bytes) -> None:
    async def test() -> None:
        async with on_a_socket() as service:
            _, writer = await asyncio.open_connection("127.0.0.1", service.port)
            writer.write(post(text="a"))
            uid = (await service.engine.take(Submit)).uid
            with pytest.raises(ConnectionError):
                for _ in range(10_000):
                    writer.write(ahead)
                    await writer.drain()
            assert (await service.engine.take(Abort)).uid == uid
            writer.close()

    run(test())
