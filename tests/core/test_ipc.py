"""The sockets between the processes."""

from __future__ import annotations

import shutil
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from gapless.runtime.core.errors import ConfigError
from gapless.runtime.core.ipc import SCHEDULER, Receiver, Sender, _endpoint, private_directory
from gapless.runtime.core.messages import Abort, Stop

WAIT_MS = 20_000


@pytest.fixture
def context() -> Iterator[zmq.Context[Any]]:
    context: zmq.Context[Any] = zmq.Context()
    yield context
    context.destroy(linger=0)


@pytest.fixture
def directory() -> Iterator[Path]:
    directory = private_directory()
    yield directory
    shutil.rmtree(directory)


def take(receiver: Receiver[Any], count: int) -> list[Any]:
    messages: list[Any] = []
    while len(messages) < count:
        assert receiver.wait(WAIT_MS)
        messages += receiver.drain()
    return messages


def test_messages_arrive_in_order_even_from_before_the_reader_was_there(
    context: zmq.Context[Any], directory: Path
) -> None:
    sender = Sender(context, directory, SCHEDULER)
    sent = [Abort(i) if i % 2 else Stop(i, 1, 1) for i in range(5000)]
    for message in sent:  # nobody reads yet: sending does not block
        sender.send(message)
    receiver: Receiver[Any] = Receiver(context, directory, SCHEDULER)
    assert take(receiver, len(sent)) == sent
    receiver.close()
    sender.close()


def test_drain_does_not_wait(context: zmq.Context[Any], directory: Path) -> None:
    receiver: Receiver[Any] = Receiver(context, directory, SCHEDULER)
    assert receiver.drain() == []
    assert receiver.wait(0) is False
    receiver.close()


def test_a_message_that_is_none_is_dropped_and_the_next_is_read(
    context: zmq.Context[Any], directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    receiver: Receiver[Any] = Receiver(context, directory, SCHEDULER)
    stranger = context.socket(zmq.PUSH)
    stranger.connect(f"ipc://{directory / 'scheduler'}")
    stranger.send(b"cos\nsystem\n(S'true'\ntR.")
    stranger.send(b"\x92\xa5Abort\x07")
    assert take(receiver, 1) == [Abort(7)]
    assert "dropped a message" in caplog.text
    stranger.close()
    receiver.close()


def test_the_directory_is_private_and_fresh(directory: Path) -> None:
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    other = private_directory()
    assert other != directory
    other.rmdir()


@pytest.mark.parametrize("mode", [0o755, 0o770, 0o777])
def test_a_directory_that_others_can_enter_is_refused(directory: Path, mode: int) -> None:
    directory.chmod(mode)
    with pytest.raises(ConfigError, match="mode 0700"):
        _endpoint(directory, "scheduler")


def test_a_directory_of_another_user_is_refused(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    owner = directory.stat().st_uid
    monkeypatch.setattr("os.getuid", lambda: owner + 1)
    with pytest.raises(ConfigError, match="belong to this user"):
        _endpoint(directory, "scheduler")
