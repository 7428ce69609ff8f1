"""Fixtures for tests that run the real server. Every wait is bounded; nothing sleeps to synchronise."""

from __future__ import annotations

import json
import os
import queue
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import httpx
import pytest
from hypothesis import HealthCheck, settings

START_SECONDS = 60.0
STOP_SECONDS = 30.0

# A busy machine must not fail a test for being slow.
settings.register_profile("gapless", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("gapless")


class Watched:
    """A process of any parent, held by a descriptor, so that its number cannot come to mean another one."""

    def __init__(self, pid: int) -> None:
        self.pid, self._fd = pid, os.pidfd_open(pid)

    def within(self, seconds: float) -> bool:
        """True when the process ends within the time."""
        return bool(select.select([self._fd], [], [], seconds)[0])

    def send(self, number: signal.Signals) -> None:
        signal.pidfd_send_signal(self._fd, number)

    def close(self) -> None:
        os.close(self._fd)


def child_pids(pid: int) -> list[int]:
    """The children of a process, whichever of its threads started them."""
    return [
        int(word)
        for task in Path(f"/proc/{pid}/task").glob("*/children")
        for word in task.read_text().split()
    ]


@pytest.fixture
def children_of() -> Callable[[int], list[int]]:
    return child_pids


@pytest.fixture
def watch() -> Iterator[Callable[[int], Watched]]:
    watched: list[Watched] = []

    def start(pid: int) -> Watched:
        watched.append(Watched(pid))
        return watched[-1]

    yield start
    for item in watched:
        item.close()


class Stream:
    """A streamed POST /generate that a thread reads: `events` as they came, `error` where the connection broke."""

    def __init__(self, url: str, body: dict[str, Any]) -> None:
        self.events: list[dict[str, Any]] = []
        self.status = 0
        self.done = False
        self.error: httpx.HTTPError | None = None
        self._arrived: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._read, args=(url, body | {"stream": True}), daemon=True)
        self._thread.start()

    def _read(self, url: str, body: dict[str, Any]) -> None:
        try:
            with httpx.stream("POST", f"{url}/generate", json=body, timeout=60) as response:
                self.status = response.status_code
                for line in response.iter_lines():
                    if line == "data: [DONE]":
                        self.done = True
                    elif line.startswith("data: "):
                        self.events.append(json.loads(line.removeprefix("data: ")))
                        self._arrived.put(True)
        except httpx.HTTPError as error:
            self.error = error

    def wait_first(self) -> None:
        assert self._arrived.get(timeout=30)

    def wait_end(self, seconds: float = 30) -> None:
        self._thread.join(seconds)
        assert not self._thread.is_alive(), "the stream did not end"


def module_of(pid: int, seconds: float = 10) -> str:
    """What the process runs with `-m`; its command line is empty for a moment while it starts."""
    deadline = time.monotonic() + seconds
    while "-m" not in (words := Path(f"/proc/{pid}/cmdline").read_text().split("\0")):
        assert time.monotonic() < deadline, f"process {pid} runs no module: {words}"
        time.sleep(0.001)
    return words[words.index("-m") + 1]


class Server:
    """`gapless serve` as a user starts it, on a free port; `log` is what it wrote to stderr."""

    def __init__(self, log: Path, *options: str, env: dict[str, str] | None = None) -> None:
        self._log = log
        with log.open("wb") as stderr:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", "gapless.runtime.cli", "serve", "--port=0", *options],
                stdout=subprocess.PIPE,
                stderr=stderr,
                env=os.environ | (env or {}),
            )
        assert self.process.stdout is not None
        line = self.process.stdout.readline().decode()
        assert "listening on http://" in line, f"{line!r}\n{self.log}"
        self.url = line.split()[-1]

    @property
    def log(self) -> str:
        return self._log.read_text()

    def wait_health(self, status: int, seconds: float = START_SECONDS) -> None:
        """Polls /health until it answers `status`."""
        deadline = time.monotonic() + seconds
        seen: object = None
        while time.monotonic() < deadline:
            try:
                seen = httpx.get(f"{self.url}/health", timeout=5).status_code
            except httpx.TransportError as error:
                seen = error
            if seen == status:
                return
            assert self.process.poll() is None or status == 0, f"the server ended:\n{self.log}"
            time.sleep(0.02)
        raise AssertionError(f"/health is {seen!r} after {seconds} s, not {status}\n{self.log}")

    def generate(self, **body: Any) -> httpx.Response:
        return httpx.post(f"{self.url}/generate", json=body, timeout=60)

    def stream(self, **body: Any) -> Stream:
        return Stream(self.url, body)

    def children(self) -> dict[str, Watched]:
        """The launcher's children by the name of their package."""
        found = {}
        for pid in child_pids(self.process.pid):
            found[module_of(pid).split(".")[-2]] = Watched(pid)
        return found

    def info(self) -> dict[str, Any]:
        return dict(httpx.get(f"{self.url}/server_info", timeout=5).json())

    def wait_info(self, name: str, value: int, seconds: float = 30) -> None:
        """Polls /server_info until the number `name` is `value`."""
        deadline = time.monotonic() + seconds
        while (seen := self.info()[name]) != value:
            assert time.monotonic() < deadline, f"{name} is {seen} after {seconds} s, not {value}"
            time.sleep(0.02)

    def wait_idle(self, seconds: float = 5) -> None:
        """Waits until no request is left and the pool is accounted for: every page free or in the cache."""
        deadline = time.monotonic() + seconds
        while True:
            info = self.info()
            state = {name: info[name] for name in ("live_requests", "running", "waiting", "used_tokens")}
            if not any(state.values()):
                assert info["idle_violations"] == 0, "the accounting at rest was not exact"
                return
            assert time.monotonic() < deadline, f"not idle: {state}"
            time.sleep(0.02)

    def wait(self, seconds: float = STOP_SECONDS) -> int:
        return self.process.wait(seconds)

    def stop(self) -> int:
        self.process.terminate()
        return self.wait()

    def close(self) -> None:
        """Ends what a failed test left."""
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(5)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


class Serve(Protocol):
    def __call__(self, *options: str, healthy: bool = True, env: dict[str, str] | None = None) -> Server: ...


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Serve]:
    """Starts servers of the toy model. One that still runs at the end must be idle, stop with 0 and leave no child."""
    servers: list[Server] = []

    def start(*options: str, healthy: bool = True, env: dict[str, str] | None = None) -> Server:
        servers.append(Server(tmp_path / f"server{len(servers)}.log", "--model-path=toy", *options, env=env))
        if healthy:
            servers[-1].wait_health(200)
        return servers[-1]

    yield start
    try:
        for server in servers:
            if server.process.poll() is None:
                server.wait_idle()
                children = server.children()
                assert server.stop() == 0, server.log
                assert all(child.within(1) for child in children.values())
    finally:
        for server in servers:
            server.close()
