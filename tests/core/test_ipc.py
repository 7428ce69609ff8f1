"""The sockets between the processes."""

from __future__ import annotations

import asyncio
import pickle
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from gapless.runtime.core.errors import ConfigError
from gapless.runtime.core.ipc import (
    DETOKENIZER,
    FRONT,
    SCHEDULER,
    Decoder,
    Receiver,
    Sender,
    _endpoint,
    encode,
    private_directory,
)
from gapless.runtime.core.messages import Abort, StepOutput, Stop, Submit, TextOutput, column
from gapless.runtime.core.sampling import SamplingParams

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


ONE = column([1], "<i4")
READY_WITHOUT_END = b"\x98\xa5Ready\x01\x01\x01\x01\x90\xcb" + bytes(8) + b"\x81\xa1a" + b"\x91" * 100_000


@pytest.mark.parametrize(
    ("channel", "data"),
    [
        (SCHEDULER, pickle.dumps({"uid": 1})),
        (SCHEDULER, encode(StepOutput([], b"", b"", b"", b"", []))),
        (SCHEDULER, encode(Submit(1, b"odd", SamplingParams(), (), 0))),
        (SCHEDULER, b"\xdd\xff\xff\xff\xff"),
        (DETOKENIZER, READY_WITHOUT_END),
        (DETOKENIZER, encode(StepOutput([], ONE * 2, ONE, ONE, b"\0", []))),
        (DETOKENIZER, encode(StepOutput([], b"odd", b"odd", b"odd", b"o", []))),
        (DETOKENIZER, b"\x97\xaaStepOutput\xdd\xff\xff\xff\xff"),
        (FRONT, encode(TextOutput(bytes(8), ["a", "b"], ONE, ONE, [], []))),
        (FRONT, encode(TextOutput(bytes(8), ["a"], column([-1], "<i4"), b"", [], []))),
        (FRONT, encode(TextOutput(bytes(8), ["a"], ONE, ONE * 2, [], []))),
    ],
)
def test_what_does_not_fit_is_dropped(
    channel: tuple[str, Any], data: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    """Neither an exception, which would end the process, nor half a message."""
    assert Decoder(channel)(data) is None
    assert f"on channel {channel[0]}" in caplog.text


def test_a_message_that_cannot_be_handled_takes_no_other_with_it(
    context: zmq.Context[Any], directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    handled: list[int] = []

    async def read() -> None:
        loop, last = asyncio.get_running_loop(), asyncio.Event()

        def handle(message: Abort) -> None:
            if message.uid == 2:
                raise KeyError("a defect")
            handled.append(message.uid)
            if message.uid == 3:
                last.set()

        receiver: Receiver[Any] = Receiver(context, directory, SCHEDULER)
        sender = Sender(context, directory, SCHEDULER)
        for uid in (1, 2, 3):
            sender.send(Abort(uid))
        stop = receiver.read_on_loop(loop, handle)
        await asyncio.wait_for(last.wait(), WAIT_MS / 1000)
        stop()
        sender.close()
        receiver.close()

    asyncio.run(read())
    assert handled == [1, 3]
    assert "a defect" in caplog.text


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
