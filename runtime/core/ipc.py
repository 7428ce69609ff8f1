"""ZeroMQ PUSH/PULL sockets in a private directory, carrying typed MessagePack.

No pickle: what is not one of the expected structs, or has columns that do not fit together, is logged and dropped.
"""

from __future__ import annotations

import asyncio
import logging
import os
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec
import zmq

from gapless.runtime.core.errors import ConfigError
from gapless.runtime.core.messages import (
    StepOutput,
    Submit,
    TextOutput,
    ToDetokenizer,
    ToFront,
    ToScheduler,
    int32s,
)

log = logging.getLogger("gapless.ipc")
T = TypeVar("T")
encode = msgspec.msgpack.Encoder().encode

# Endpoint names; the union is what its reader accepts.
SCHEDULER: tuple[str, Any] = ("scheduler", ToScheduler)
DETOKENIZER: tuple[str, Any] = ("detokenizer", ToDetokenizer)
FRONT: tuple[str, Any] = ("front", ToFront)


def private_directory() -> Path:
    """A fresh directory with a random name that only this user can enter; its maker removes it at exit."""
    return Path(tempfile.mkdtemp(prefix="gapless-"))


def _endpoint(directory: Path, name: str) -> str:
    info = directory.stat()
    if info.st_uid != os.getuid() or stat.S_IMODE(info.st_mode) != 0o700:
        raise ConfigError(f"socket directory {directory} must belong to this user with mode 0700")
    return f"ipc://{directory / name}"


class Sender:
    """The PUSH end. Sending never blocks: what the reader has not taken yet waits in this process's memory."""

    def __init__(self, context: zmq.Context[Any], directory: Path, channel: tuple[str, Any]) -> None:
        endpoint = _endpoint(directory, channel[0])
        self._socket = context.socket(zmq.PUSH)
        self._socket.set_hwm(0)
        self._socket.setsockopt(zmq.LINGER, 1000)
        self._socket.connect(endpoint)

    def send(self, message: Any) -> None:
        self._socket.send(encode(message), zmq.NOBLOCK, copy=True)

    def close(self) -> None:
        self._socket.close()


class Receiver(Generic[T]):
    """The PULL end, bound by the one process that reads the channel."""

    def __init__(self, context: zmq.Context[Any], directory: Path, channel: tuple[str, Any]) -> None:
        endpoint = _endpoint(directory, channel[0])
        self._name = channel[0]
        self._decode = Decoder(channel)
        self.socket = context.socket(zmq.PULL)
        self.socket.set_hwm(0)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.bind(endpoint)

    def wait(self, timeout_ms: int) -> bool:
        """True when something can be received within the time."""
        return bool(self.socket.poll(timeout_ms))

    def drain(self) -> list[T]:
        """All messages that have come, in order, without waiting."""
        messages: list[T] = []
        # Asking first is four times cheaper than the exception of an empty receive.
        while self.socket.getsockopt(zmq.EVENTS) & zmq.POLLIN:
            message = self._decode(self.socket.recv(zmq.NOBLOCK))
            if message is not None:
                messages.append(message)
        return messages

    def read_on_loop(
        self, loop: asyncio.AbstractEventLoop, handle: Callable[[T], object]
    ) -> Callable[[], object]:
        """Hands every message to `handle`, on `loop`; call what it returns to stop that.

        ZeroMQ's descriptor tells of changes only, not of a state: every reading goes on until nothing is left, and
        one comes first. A message that `handle` fails on is logged and takes no other with it.
        """

        def read() -> None:
            for message in self.drain():
                try:
                    handle(message)
                except Exception:
                    kind = type(message).__name__
                    log.exception("cannot handle a message %s on channel %s", kind, self._name)

        descriptor = self.socket.getsockopt(zmq.FD)
        loop.add_reader(descriptor, read)
        loop.call_soon(read)
        return lambda: loop.remove_reader(descriptor)

    def close(self) -> None:
        self.socket.close()


class Decoder:
    """Bytes to a message of the channel's union, or None, logged, for anything else."""

    def __init__(self, channel: tuple[str, Any]) -> None:
        self._name = channel[0]
        self._decode: Callable[[bytes], Any] = msgspec.msgpack.Decoder(channel[1]).decode

    def __call__(self, data: bytes) -> Any:
        try:
            message = self._decode(data)
            _check_columns(message)
            return message
        except (ValueError, RecursionError) as error:
            log.error("dropped a message of %d bytes on channel %s: %s", len(data), self._name, error)
            return None


def _check_columns(message: Any) -> None:
    """What the types cannot say: raises ValueError for columns of different lengths."""
    match message:
        case StepOutput():
            rows = len(message.finish)
            fit = len(message.slots) == len(message.generations) == len(message.ids) == 4 * rows
        case TextOutput():
            rows = len(message.texts)
            fit = len(message.uids) == 8 * rows and len(message.counts) == 4 * rows
            counts = int32s(message.counts) if fit else None
            fit = counts is not None and counts.min(initial=0) >= 0 and 4 * counts.sum() == len(message.ids)
        case Submit():
            fit = len(message.input_ids) % 4 == 0
        case _:
            return
    if not fit:
        raise ValueError(f"the columns of a {type(message).__name__} do not fit together")
