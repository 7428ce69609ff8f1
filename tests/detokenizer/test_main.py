"""The detokenizer as a process between the channels."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import zmq

from gapless.runtime.core.child import Child, ChildSpec
from gapless.runtime.core.config import ServerConfig
from gapless.runtime.core.ipc import DETOKENIZER, FRONT, SCHEDULER, Receiver, Sender, private_directory
from gapless.runtime.core.messages import (
    Fatal,
    Finish,
    Flushed,
    Heartbeat,
    Opened,
    Ready,
    StepOutput,
    Stop,
    TextOutput,
    column,
)

WAIT_MS = 30_000
EMPTY = StepOutput([], b"", b"", b"", b"", [])


class Detokenizer:
    def __init__(self) -> None:
        self.directory = private_directory()
        self._context: zmq.Context[Any] = zmq.Context()
        self.front: Receiver[Any] = Receiver(self._context, self.directory, FRONT)
        self.scheduler: Receiver[Any] = Receiver(self._context, self.directory, SCHEDULER)
        self.sender = Sender(self._context, self.directory, DETOKENIZER)
        self.child = Child(
            "gapless.detokenizer.main", ChildSpec(ServerConfig(model_path="toy"), self.directory)
        )

    def close(self) -> None:
        self.child.kill()
        self._context.destroy(linger=0)
        shutil.rmtree(self.directory)


@pytest.fixture
def detokenizer() -> Iterator[Detokenizer]:
    process = Detokenizer()
    yield process
    process.close()


def take(receiver: Receiver[Any], count: int) -> list[Any]:
    messages: list[Any] = []
    while len(messages) < count:
        assert receiver.wait(WAIT_MS)
        messages += receiver.drain()
    return messages


def test_messages_go_where_they_belong_in_order(detokenizer: Detokenizer) -> None:
    ready, beat = Ready(600, 64, 500, 60, (599,), 1.5, {"device": "fake"}), Heartbeat(1.0, 0.0, 1, 2, 3, 4)
    step = StepOutput(
        [Opened(7, 1, 1, 5, 2, ("!",), True, False)],
        column([1, 1], "<i4"),
        column([1, 1], "<i4"),
        column(list(b"a!"), "<i4"),
        column([Finish.NONE] * 2, "u1"),
        [],
    )
    flushed, fatal = Flushed(4, False, 0, 1, 2), Fatal("the device hung")
    for message in (ready, EMPTY, step, beat, flushed, fatal, beat):
        detokenizer.sender.send(message)
    got = take(detokenizer.front, 6)
    assert [got[0], *got[2:]] == [ready, beat, flushed, fatal, beat]
    assert isinstance(got[1], TextOutput)
    assert (got[1].texts, got[1].finished[0].matched) == (["a", ""], "!")
    assert take(detokenizer.scheduler, 1) == [Stop(1, 1, 2)]


def test_it_runs_until_its_parent_ends(detokenizer: Detokenizer) -> None:
    detokenizer.sender.send(Fatal("the device hung"))
    take(detokenizer.front, 1)
    detokenizer.sender.send(Heartbeat(1.0, 0.0, 1, 2, 3, 4))
    take(detokenizer.front, 1)
    assert detokenizer.child.process.stdin is not None
    detokenizer.child.process.stdin.close()
    assert detokenizer.child.process.wait(WAIT_MS / 1000) != 0


def test_neither_torch_nor_the_tokenizers_library_is_imported() -> None:
    code = "import sys, gapless.detokenizer.main; sys.exit(bool({'torch', 'tokenizers'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-P", "-c", code], check=False).returncode == 0
