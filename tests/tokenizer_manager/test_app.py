"""The other routes, errors of HTTP itself, and the engine's health."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from gapless.runtime.core.config import ServerConfig
from gapless.runtime.core.messages import Fatal, Finish, Heartbeat, Ready
from gapless.runtime.tokenizer.byte_tokenizer import ByteTokenizer
from gapless.tokenizer_manager.front import Front

READY = Ready(600, 64, 500, 60, (599,), 1.5, {"device": "fake"})


def test_health_follows_the_heartbeat() -> None:
    now = 100.0
    front = Front(ServerConfig(model_path="toy"), lambda message: None, lambda: now)

    def status() -> str:
        return str(front.health()["status"])

    assert status() == "loading"
    front.handle(Heartbeat(99.9, 0, 0, 0, 0, 0))
    front.handle(READY)
    assert status() == "loading"
    front.tokenizer = ByteTokenizer()
    assert status() == "ok"
    now = 102.0
    assert status() == "stalled"
    assert "2.0 s" in front.health()["reason"]
    front.handle(Heartbeat(101.9, 0, 0, 0, 0, 1))
    assert status() == "ok"
    front.draining = True
    assert status() == "draining"
    front.handle(Fatal("the device hung"))
    front.handle(Heartbeat(102.0, 0, 0, 0, 0, 1))
    assert front.health() == {"status": "dead", "reason": "the engine stopped: the device hung"}


def test_health_over_http(run: Any, in_process: Any) -> None:
    async def test() -> None:
        async with in_process(loaded=False) as service:
            response = await service.client.get("/health")
            assert (response.status_code, response.json()["status"]) == (503, "loading")
            response = await service.generate(text="a")
            assert (response.status_code, response.headers["retry-after"]) == (503, "1")
        async with in_process() as service:
            assert (await service.client.get("/health")).json() == {"status": "ok"}
            service.front.draining = True
            response = await service.generate(text="a")
            assert (response.status_code, response.headers["connection"]) == (503, "close")

    run(test())


def test_a_stalled_engine_gets_no_new_requests(run: Any, on_a_socket: Any) -> None:
    """A router can send them elsewhere. Those that the engine has wait for it: it may go on, or its watchdog bites."""

    async def test() -> None:
        async with on_a_socket() as service:
            answer, submit = await service.start(text="a")
            service.engine.now = 2.0
            refused = await service.generate(text="b")
            assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
            assert "no heartbeat" in refused.json()["error"]["message"]
            service.front.handle(Heartbeat(1.9, 0, 0, 0, 0, 1))
            service.engine.gain(submit.uid, "x", [1], Finish.LENGTH)
            assert (await answer).status_code == 200
            answer, submit = await service.start(text="c")
            service.engine.gain(submit.uid, "x", [1], Finish.LENGTH)
            assert (await answer).status_code == 200

    run(test())


def test_info_has_the_types_that_routers_read(run: Any, in_process: Any) -> None:
    """One field of a wrong type makes sglang-router drop the whole object."""

    async def test() -> None:
        async with in_process(served_model_name="name") as service:
            await service.generate(text="a")
            service.front.handle(Heartbeat(1.0, 0.0, 3, 4, 128, 9))
            for path in ("/server_info", "/get_server_info"):
                info = (await service.client.get(path)).json()
                sizes = (info["dp_size"], info["tp_size"], info["max_total_tokens"], info["context_length"])
                assert sizes == (1, 1, 500, 64)
                assert (info["served_model_name"], info["model_path"], info["device"]) == (
                    "name",
                    "toy",
                    "fake",
                )
                assert (info["running"], info["waiting"], info["used_tokens"]) == (3, 4, 128)
            for path in ("/model_info", "/get_model_info"):
                info = (await service.client.get(path)).json()
                assert (info["model_path"], info["served_model_name"]) == ("toy", "name")
                assert info["is_generation"] is True

    run(test())


def test_info_while_loading(run: Any, in_process: Any) -> None:
    async def test() -> None:
        async with in_process(loaded=False) as service:
            assert (await service.client.get("/server_info")).json()["status"] == "loading"
            assert (await service.client.get("/model_info")).json()["model_path"] == "toy"

    run(test())


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/nowhere", 404, "not_found"),
        ("POST", "/generate/", 404, "not_found"),
        ("GET", "/generate", 405, "method_not_allowed"),
        ("POST", "/health", 405, "method_not_allowed"),
    ],
)
def test_http_errors_have_the_shape_of_all_errors(
    run: Any, in_process: Any, method: str, path: str, status: int, code: str
) -> None:
    async def test() -> None:
        async with in_process() as service:
            response = await service.client.request(method, path)
            assert response.status_code == status
            error = response.json()["error"]
            assert error["code"] == code
            assert set(error) == {"message", "type", "param", "code"}
            assert ("allow" in response.headers) == (status == 405)

    run(test())


def test_a_defect_is_a_500_of_the_same_shape(run: Any, in_process: Any) -> None:
    async def test() -> None:
        async with in_process() as service:
            service.front.tokenizer.encode = lambda text: 1 / 0
            response = await service.generate(text="a")
            assert (response.status_code, response.json()["error"]["code"]) == (500, "internal_error")
            assert len(service.front.registry) == 0

    run(test())


async def _talk(port: int, sent: bytes) -> bytes:
    """What the server answers until it closes the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(sent)
    try:
        return await asyncio.wait_for(reader.read(), 20)
    except ConnectionResetError:  # it has closed with our bytes unread
        return b""
    finally:
        writer.close()


@pytest.mark.parametrize(
    "sent",
    [
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"POST /generate HTTP/1.1\r\nContent-Length: x\r\n\r\n",
        b"GET http://[::1 HTTP/1.1\r\n\r\n",
        b"GET /\xff HTTP/1.1\r\n\r\n",
    ],
    ids=["http2", "tls", "length", "url", "path"],
)
def test_what_is_not_http_1_is_refused_and_survived(run: Any, on_a_socket: Any, sent: bytes) -> None:
    async def test() -> None:
        async with on_a_socket() as service:
            answer = await _talk(service.port, sent)
            assert answer == b"" or answer.startswith(b"HTTP/1.1 400 ")
            assert (await service.client.get("/health")).status_code == 200

    run(test())


def test_a_body_is_refused_by_its_declared_length(run: Any, on_a_socket: Any) -> None:
    async def test() -> None:
        async with on_a_socket() as service:
            head = b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000000\r\n\r\n"
            answer = await _talk(service.port, head)
            assert answer.startswith(b"HTTP/1.1 413 ")
            assert b'"code":"too_large"' in answer

    run(test())


def test_a_chunked_body_is_refused_once_it_is_too_large(run: Any, on_a_socket: Any) -> None:
    async def test() -> None:
        async with on_a_socket(max_body_bytes=1024) as service:
            head = b"POST /generate HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
            answer = await _talk(service.port, head + b"800\r\n" + b" " * 0x800 + b"\r\n")
            assert answer.startswith(b"HTTP/1.1 413 ")

    run(test())
