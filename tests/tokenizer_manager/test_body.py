"""What request bodies may take of the process's memory."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import pytest

from gapless.runtime.core.messages import Finish
from gapless.tokenizer_manager import body, generate

WAIT = 20
HEAD = b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n"


def test_unfinished_bodies_are_bounded_together(
    run: Any, on_a_socket: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clients that send all but the last byte: one too many gets 503, short requests go on, and the room comes back."""

    async def test() -> None:
        size = 1 << 20
        async with on_a_socket(max_body_bytes=size) as service:
            stuck = []
            for _ in range(3):
                reader, writer = await asyncio.open_connection("127.0.0.1", service.port)
                writer.write(HEAD % size + b" " * (size - 1))
                stuck.append((reader, writer))
            (refused,) = (
                await asyncio.wait(
                    [asyncio.create_task(reader.readline()) for reader, _ in stuck],
                    return_when=asyncio.FIRST_COMPLETED,
                    timeout=WAIT,
                )
            )[0]
            assert b" 503 " in refused.result()
            answer, submit = await service.start(text="a")
            service.engine.gain(submit.uid, "x", [1], Finish.LENGTH)
            assert (await answer).status_code == 200
            for _, writer in stuck:
                writer.close()
            text = "a" + " " * (size // 2)
            while (response := await service.generate(text=text)).status_code == 503:
                await asyncio.sleep(0.01)
            assert response.json()["error"]["param"] == "text"  # read, and refused for its length alone

    monkeypatch.setattr(body, "LONGEST_AT_ONCE", 2)
    run(test())


def test_a_running_request_keeps_no_body(run: Any, on_a_socket: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its answer may take long: neither the body nor the prompts are held meanwhile."""
    bodies: list[bytearray] = []
    prompts: list[list[Any]] = []
    parse = generate.parse_generate

    def parse_noted(data: bytearray, config: Any) -> Any:
        request = parse(data, config)
        bodies.append(data)
        prompts.append(request.prompts)
        return request

    async def test() -> None:
        async with on_a_socket() as service:
            answer, submit = await service.start(text="a")
            assert prompts == [[]]
            references = sys.getrefcount(bodies[0])
            assert references == 2  # the list's and the call's
            service.engine.gain(submit.uid, "x", [1], Finish.LENGTH)
            assert (await answer).status_code == 200

    monkeypatch.setattr(generate, "parse_generate", parse_noted)
    run(test())
