"""A client that goes takes its requests with it."""

from __future__ import annotations

import asyncio
import logging
import threading
from typing import Any

import msgspec
import pytest

from gapless.runtime.core.messages import Abort, Finish, Submit


class Connection:
    """A client that can go at any moment."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    @classmethod
    async def post(cls, port: int, **fields: Any) -> Connection:
        connection = cls(*await asyncio.open_connection("127.0.0.1", port))
        body = msgspec.json.encode(fields)
        head = f"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        connection.writer.write(head.encode() + body)
        return connection

    async def go(self) -> None:
        self.writer.close()
        await self.writer.wait_closed()


@pytest.mark.parametrize("stream", [False, True])
def test_a_disconnect_aborts_once(run: Any, on_a_socket: Any, stream: bool) -> None:
    """Before the first token: the request is queued or in its prefill, whatever the engine does with it."""

    async def test() -> None:
        async with on_a_socket() as service:
            connection = await Connection.post(service.port, text="abc", stream=stream)
            uid = (await service.engine.take(Submit)).uid
            await connection.go()
            assert (await service.engine.take(Abort)).uid == uid
            assert len(service.front.registry) == 1  # its slot is still held
            service.engine.gain(uid, finish=Finish.ABORT)
            assert len(service.front.registry) == 0
            await asyncio.wait_for(service.front.registry.idle.wait(), 20)
            assert service.engine.aborts() == [uid]

    run(test())


def test_a_disconnect_in_mid_stream(run: Any, on_a_socket: Any) -> None:
    async def test() -> None:
        async with on_a_socket() as service:
            connection = await Connection.post(service.port, text=["a", "b"], stream=True)
            uids = [(await service.engine.take(Submit)).uid for _ in range(2)]
            service.engine.gain(uids[0], "x", [1], Finish.LENGTH)
            service.engine.gain(uids[1], "x", [1])
            await asyncio.wait_for(connection.reader.readuntil(b"data: "), 20)
            await connection.go()
            assert (await service.engine.take(Abort)).uid == uids[1]
            service.engine.gain(uids[1], "y", [2])
            service.engine.gain(uids[1], finish=Finish.ABORT)
            assert (len(service.front.registry), service.engine.aborts()) == (0, [uids[1]])

    run(test())


def test_a_disconnect_while_the_client_does_not_read(run: Any, on_a_socket: Any) -> None:
    """The handler waits for room to write. It still hears of the end, and keeps no queue of events."""

    async def test() -> None:
        async with on_a_socket(incremental_streaming_output=True) as service:
            connection = await Connection.post(service.port, text="a", stream=True)
            uid = (await service.engine.take(Submit)).uid
            state = service.front.registry._live[uid]
            service.engine.gain(uid, "x" * (32 << 20), [1])
            while state.sent_ids == 0:
                await asyncio.sleep(0)
            for _ in range(3):  # the first is taken, then the handler is stuck in its write
                service.engine.gain(uid, "y", [2])
                for _ in range(10):
                    await asyncio.sleep(0)
            connection.writer.transport.abort()
            assert (await service.engine.take(Abort)).uid == uid
            await asyncio.wait_for(service.front.registry.idle.wait(), 20)

    run(test())


def test_300_disconnects_leave_nothing(run: Any, on_a_socket: Any, caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        async with on_a_socket() as service:
            caplog.clear()  # it has said that it is ready
            for turn in range(300):
                connection = await Connection.post(service.port, text="secret", stream=bool(turn % 2))
                uid = (await service.engine.take(Submit)).uid
                if turn % 3 == 0:
                    service.engine.gain(uid, "x", [1])
                await connection.go()
                assert (await service.engine.take(Abort)).uid == uid
                service.engine.gain(uid, finish=Finish.ABORT)
            assert len(service.front.registry) == 0
            await asyncio.wait_for(service.front.registry.idle.wait(), 20)
            assert len(service.engine.aborts()) == 300

    with caplog.at_level(logging.DEBUG, "gapless"), caplog.at_level(logging.INFO, "uvicorn"):
        run(test())
    assert [r for r in caplog.records if r.name.startswith(("gapless", "uvicorn"))] == []


def test_a_client_that_goes_at_its_last_token_aborts_nothing(run: Any, on_a_socket: Any) -> None:
    async def test() -> None:
        async with on_a_socket() as service:
            for _ in range(100):
                connection = await Connection.post(service.port, text="a", stream=True)
                uid = (await service.engine.take(Submit)).uid
                service.engine.gain(uid, "x", [1], Finish.LENGTH)
                await connection.go()
            await asyncio.wait_for(service.front.registry.idle.wait(), 20)
            assert (len(service.front.registry), service.engine.aborts()) == (0, [])

    run(test())


def test_a_client_that_goes_during_tokenization(run: Any, on_a_socket: Any) -> None:
    async def test() -> None:
        async with on_a_socket() as service:
            service.front.handle(
                msgspec.structs.replace(service.front.ready, max_prompt_tokens=10_000, context_length=10_001)
            )
            loop, encode = asyncio.get_running_loop(), service.front.tokenizer.encode
            entered, leave = asyncio.Event(), threading.Event()

            def slow(text: str, add_special_tokens: bool) -> list[int]:
                loop.call_soon_threadsafe(entered.set)
                assert leave.wait(20)
                return list(encode(text[:3]))

            service.front.tokenizer.encode = slow
            connection = await Connection.post(service.port, text="x" * 10_000, rid="r")
            await asyncio.wait_for(entered.wait(), 20)
            await connection.go()
            try:
                while len(service.front.registry):  # the id is free again before the thread is done
                    await asyncio.sleep(0)
            finally:
                leave.set()
            await asyncio.wait_for(service.front.registry.idle.wait(), 20)
            assert service.engine.sent == []

    run(test())
