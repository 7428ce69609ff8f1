"""The launcher: starts the server's three processes, watches them, and ends them together.

It loads nothing itself. Its one loop waits on a queue for a signal or for the death of a child.
"""

from __future__ import annotations

import contextlib
import shutil
import signal
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import zmq

from gapless.runtime.core.child import EXIT_BAD_INPUT, Child, ChildSpec
from gapless.runtime.core.config import ServerConfig
from gapless.runtime.core.errors import ConfigError, InternalError
from gapless.runtime.core.ipc import FRONT, Sender, private_directory
from gapless.runtime.core.keys import is_loopback
from gapless.runtime.core.messages import Fatal

SCHEDULER = "gapless.runtime.scheduler.main"
DETOKENIZER = "gapless.detokenizer.main"
HTTP = "gapless.tokenizer_manager.main"

NOTICE_SECONDS = 1.0  # how long a server that failed still answers 503 before it goes
GRACE_SECONDS = 1.5  # how long the HTTP process may then take to end; added to the drain timeout, too
_BACKLOG = 2048
_SLICE_SECONDS = 0.2


def launch(config: ServerConfig) -> int:
    """Serves until SIGTERM, SIGINT or a failure, and returns the exit code. Call it from the main thread.

    0: stopped by a signal, open requests were finished; 1: a process died; 2: an option or the model is wrong
    (ConfigError where that shows before anything starts); 128 + n: a second signal n cut the draining short.
    """
    with _signals() as events, bind(config) as listener, _private_directory() as directory:
        server = _Server(config, directory, events)
        try:
            server.start(listener)
            return server.supervise()
        finally:
            server.close()


def bind(config: ServerConfig) -> socket.socket:
    """The listening socket, taken before anything loads; raises ConfigError naming the port."""
    try:
        family, _, _, _, address = socket.getaddrinfo(config.host, config.port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(address[:2], family=family, backlog=_BACKLOG)
    except (OSError, UnicodeError) as error:  # the latter for a name that cannot be one
        why = getattr(error, "strerror", None) or error
        raise ConfigError(f"cannot listen on --host {config.host} --port {config.port}: {why}") from error


class _Server:
    """The three processes. `events` brings what happens: a child that ended, or a signal's number."""

    def __init__(self, config: ServerConfig, directory: Path, events: SimpleQueue[Child | int]) -> None:
        self._config, self._directory, self._events = config, directory, events
        self._children: list[Child] = []
        self._context: zmq.Context[Any] = zmq.Context()

    def start(self, listener: socket.socket) -> None:
        self._spawn(SCHEDULER)
        self._spawn(DETOKENIZER)
        self._http = self._spawn(HTTP, listener.fileno())
        self._front = Sender(self._context, self._directory, FRONT)
        host, port = listener.getsockname()[:2]
        listener.close()  # from here on only the HTTP process holds it, so that it closes with it
        if not (self._config.api_key or is_loopback(self._config.host)):
            _say(f"warning: whoever reaches {host} can use this server: it has no --api-key")
        print(f"gapless: listening on http://{f'[{host}]' if ':' in host else host}:{port}", flush=True)

    def _spawn(self, module: str, listen_fd: int | None = None) -> Child:
        config = (
            self._config.without_secrets() if listen_fd is None else self._config
        )  # only HTTP needs the keys
        spec = ChildSpec(config, self._directory, listen_fd, parent_death_signal=True)
        child = Child(module, spec)
        self._children.append(child)
        child.on_exit(self._events.put)
        return child

    def supervise(self) -> int:
        event = self._next(None)
        if not isinstance(event, Child):
            return self._drain()
        return 0 if self._has_stopped(event) else self._fail(event)

    def _next(self, seconds: float | None) -> Child | int:
        """The next event; raises Empty when there is none within `seconds`.

        Waits in slices: a signal that comes just before a wait begins is only handled once the wait ends.
        """
        deadline = None if seconds is None else time.monotonic() + seconds
        while True:
            left = _SLICE_SECONDS if deadline is None else min(_SLICE_SECONDS, deadline - time.monotonic())
            try:
                return self._events.get(timeout=max(left, 0.0))
            except Empty:
                if deadline is not None and time.monotonic() >= deadline:
                    raise

    def _drain(self) -> int:
        """Lets the HTTP process refuse new requests and finish the open ones."""
        self._http.process.terminate()
        try:
            event = self._next(self._config.drain_timeout + GRACE_SECONDS)
        except Empty:
            _say(f"the HTTP process did not end within --drain-timeout {self._config.drain_timeout:g} s")
            return 1
        if not isinstance(event, Child):
            return 128 + event
        return 0 if self._has_stopped(event) else self._fail(event)

    def _has_stopped(self, dead: Child) -> bool:
        """The HTTP process had a SIGTERM, from here or from a supervisor, and finished; or had nothing open yet."""
        return dead is self._http and dead.process.returncode in (0, -signal.SIGTERM)

    def _fail(self, dead: Child) -> int:
        """Says which process died and how; where that is not the HTTP process, open streams end with an error."""
        error = dead.failure()
        _say(error.message)
        if dead.process.returncode == EXIT_BAD_INPUT and not isinstance(error, InternalError):
            return EXIT_BAD_INPUT
        if dead is not self._http:
            self._front.send(Fatal(error.message))
            if not self._http_ended(NOTICE_SECONDS):
                self._http.process.terminate()
                self._http_ended(GRACE_SECONDS)
        return 1

    def _http_ended(self, seconds: float) -> bool:
        """Waits until the HTTP process has ended or a signal says not to wait; False when the time is over."""
        deadline = time.monotonic() + seconds
        with contextlib.suppress(Empty):
            while True:
                event = self._next(max(0.0, deadline - time.monotonic()))
                if event is self._http or not isinstance(event, Child):
                    return True
        return False

    def close(self) -> None:
        for child in self._children:
            child.kill()
        self._context.destroy(linger=0)


@contextlib.contextmanager
def _signals() -> Iterator[SimpleQueue[Child | int]]:
    """A queue that SIGTERM and SIGINT go to; `SimpleQueue.put` may be called from a signal handler."""
    events: SimpleQueue[Child | int] = SimpleQueue()
    old = {n: signal.signal(n, lambda n, _: events.put(n)) for n in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield events
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _private_directory() -> Iterator[Path]:
    directory = private_directory()
    try:
        yield directory
    finally:
        shutil.rmtree(
            directory, ignore_errors=True
        )  # a cleaner of temporary files may have been there before


def _say(message: str) -> None:
    print(f"gapless: {message}", file=sys.stderr, flush=True)
