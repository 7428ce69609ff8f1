"""The HTTP process as the launcher starts it; the test is the rest of the server."""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import zmq

from gapless.runtime.core.child import EXIT_BAD_INPUT, Child, ChildSpec
from gapless.runtime.core.config import ServerConfig
from gapless.runtime.core.errors import ModelLoadError
from gapless.runtime.core.ipc import FRONT, SCHEDULER, Receiver, Sender, private_directory
from gapless.runtime.core.messages import (
    Abort,
    Fatal,
    Finish,
    Finished,
    Heartbeat,
    Ready,
    Submit,
    TextOutput,
    column,
)

WAIT = 30.0
READY = Ready(600, 64, 500, 60, (599,), 1.5, {})


class Http:
    """The process, the two channels that it is between, and a client's view."""

    def __init__(self, **options: Any) -> None:
        self.directory = private_directory()
        self._context: zmq.Context[Any] = zmq.Context()
        self.scheduler: Receiver[Any] = Receiver(self._context, self.directory, SCHEDULER)
        self.front = Sender(self._context, self.directory, FRONT)
        with socket.create_server(("127.0.0.1", 0)) as listener:
            self.address = listener.getsockname()
            self.url = f"http://127.0.0.1:{self.address[1]}"
            config = ServerConfig(**{"model_path": "toy"} | options)
            self.child = Child(
                "gapless.tokenizer_manager.main", ChildSpec(config, self.directory, listener.fileno())
            )
        self.process = self.child.process
        self._threads = ThreadPoolExecutor()

    def health(self) -> str:
        return str(httpx.get(f"{self.url}/health", timeout=WAIT).json()["status"])

    def wait_health(self, status: str) -> None:
        deadline = time.monotonic() + WAIT
        while (seen := self.health()) != status:
            assert time.monotonic() < deadline, seen
            self.front.send(Heartbeat(time.monotonic() + WAIT, 0, 0, 0, 0, 0))

    def load(self) -> None:
        self.front.send(READY)
        self.wait_health("ok")

    def generate(self, **body: Any) -> Future[httpx.Response]:
        return self._threads.submit(httpx.post, f"{self.url}/generate", json=body, timeout=WAIT)

    def take(self, kind: type[Any]) -> Any:
        assert self.scheduler.wait(int(WAIT * 1000))
        (message,) = self.scheduler.drain()
        assert isinstance(message, kind)
        return message

    def gain(self, uid: int, finish: Finish) -> None:
        ends = [Finished(uid, finish, None, "", "", 1, 1, 0)] if finish else []
        self.front.send(
            TextOutput(column([uid], "<i8"), ["x"], column([1], "<i4"), column([5], "<i4"), ends, [])
        )

    def close(self) -> None:
        self.child.kill()
        self._threads.shutdown()
        self._context.destroy(linger=0)
        shutil.rmtree(self.directory)


@pytest.fixture
def http() -> Iterator[Callable[..., Http]]:
    started: list[Http] = []

    def start(**options: Any) -> Http:
        started.append(Http(**options))
        return started[-1]

    yield start
    for item in started:
        item.close()


def test_from_loading_to_a_drained_exit(http: Callable[..., Http]) -> None:
    """What is open at SIGTERM finishes, what comes after is refused, and the exit code is 0."""
    server = http()
    assert server.health() == "loading"
    server.load()
    answer = server.generate(text="abc")
    uid = server.take(Submit).uid
    server.process.send_signal(signal.SIGTERM)
    server.wait_health("draining")
    refused = server.generate(text="abc").result(WAIT)
    assert (refused.status_code, refused.headers["connection"]) == (503, "close")
    server.gain(uid, Finish.LENGTH)
    assert answer.result(WAIT).json()["text"] == "x"
    assert server.process.wait(WAIT) == 0


def test_a_drain_that_takes_too_long_ends_requests_with_an_error(http: Callable[..., Http]) -> None:
    server = http(drain_timeout=1.0)
    server.load()
    answer = server.generate(text="abc")
    server.take(Submit)
    stream = server.generate(text="abc", stream=True)
    server.gain(server.take(Submit).uid, Finish.NONE)
    server.process.send_signal(signal.SIGTERM)
    assert answer.result(WAIT).status_code == 503
    *_, error, done, _ = stream.result(WAIT).text.split("\n\n")
    assert "shutting down" in error
    assert done == "data: [DONE]"
    assert server.process.wait(WAIT) == 0


def test_a_second_sigterm_changes_nothing(http: Callable[..., Http]) -> None:
    """A supervisor may signal every process beside the launcher's own SIGTERM: what is open still finishes."""
    server = http(drain_timeout=600)
    server.load()
    answer = server.generate(text="abc")
    uid = server.take(Submit).uid
    for _ in range(2):
        server.process.send_signal(signal.SIGTERM)
        server.wait_health("draining")
    server.gain(uid, Finish.LENGTH)
    assert answer.result(WAIT).status_code == 200
    assert server.process.wait(WAIT) == 0


def test_an_idle_connection_does_not_hold_the_exit(http: Callable[..., Http]) -> None:
    server = http(drain_timeout=600)
    server.load()
    with httpx.Client(base_url=server.url) as client:
        assert client.get("/health").status_code == 200
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(WAIT) == 0


def test_sigterm_while_loading(http: Callable[..., Http]) -> None:
    server = http()
    server.wait_health("loading")
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(WAIT) == 0


def test_a_disconnect_becomes_an_abort(http: Callable[..., Http]) -> None:
    server = http()
    server.load()
    with socket.create_connection(server.address) as client:
        body = b'{"text":"abc"}'
        client.sendall(b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        uid = server.take(Submit).uid
    assert server.take(Abort).uid == uid


def test_the_end_of_the_engine(http: Callable[..., Http]) -> None:
    server = http()
    server.load()
    answer = server.generate(text="abc")
    server.take(Submit)
    server.front.send(Fatal("the device hung"))
    assert answer.result(WAIT).status_code == 500
    server.wait_health("dead")
    assert server.generate(text="abc").result(WAIT).status_code == 503
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(WAIT) == 0


def test_a_tokenizer_that_cannot_be_loaded(http: Callable[..., Http], tmp_path: Path) -> None:
    server = http(model_path=str(tmp_path / "nowhere"))
    assert server.process.wait(WAIT) == EXIT_BAD_INPUT
    assert isinstance(server.child.failure(), ModelLoadError)


def test_it_ends_with_its_parent(http: Callable[..., Http]) -> None:
    server = http()
    assert server.health() == "loading"
    assert server.process.stdin is not None
    server.process.stdin.close()
    assert server.process.wait(WAIT) != 0


def test_torch_is_not_imported() -> None:
    code = "import sys, gapless.tokenizer_manager.main; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-P", "-c", code], check=False).returncode == 0
