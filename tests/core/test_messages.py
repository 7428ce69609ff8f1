"""Messages survive their encoding, and only messages of a channel are taken from it."""

from __future__ import annotations

import logging
from typing import Any

import msgspec
import numpy as np
import pytest

from gapless.runtime.core.ipc import DETOKENIZER, FRONT, SCHEDULER, Decoder, encode
from gapless.runtime.core.messages import (
    Abort,
    Closed,
    Fatal,
    Finish,
    Finished,
    Heartbeat,
    Opened,
    Ready,
    StepOutput,
    Stop,
    Submit,
    TextOutput,
    column,
    int32s,
    int64s,
    uint8s,
)
from gapless.runtime.core.sampling import SamplingParams

READY = Ready(600, 64, 500, 60, (599,), 1.5, {"device": "cpu", "layers": 3})
BEAT = Heartbeat(1.5, 0.25, 1, 2, 3, 4)
STEP = StepOutput(
    [Opened(2**53, 1, 2, 3, 4, ("語", "\0"), True, False)],
    column([1, 2], "<i4"),
    column([3, 2**31 - 1], "<i4"),
    column([5, 6], "<i4"),
    column([Finish.NONE, Finish.LENGTH], "u1"),
    [Closed(8, Finish.FAILED, "no room", "capacity", 9)],
)
TEXT = TextOutput(
    column([2**62], "<i8"),
    ["\ufffd"],
    column([1], "<i4"),
    column([7], "<i4"),
    [
        Finished(1, Finish.STOP_STRING, "END", "", "", 1, 2, 3),
        Finished(2, Finish.STOP_TOKEN, 5, "", "", 1, 2, 3),
    ],
    [(1, 2, 3)],
)
SUBMIT = Submit(
    7,
    column([1, 2], "<i4"),
    SamplingParams.parse({"stop": ["a"], "sampling_seed": -(2**63), "logit_bias": {"7": -1}}),
    (3,),
    2**63 - 1,
    "k",
)


@pytest.mark.parametrize(
    ("channel", "message"),
    [
        *((SCHEDULER, m) for m in (SUBMIT, Abort(7), Stop(1, 2, 3))),
        *((DETOKENIZER, m) for m in (STEP, BEAT, READY, Fatal("why"))),
        *((FRONT, m) for m in (TEXT, BEAT, READY, Fatal("why"))),
    ],
)
def test_round_trip(channel: tuple[str, Any], message: Any) -> None:
    assert Decoder(channel)(msgspec.msgpack.encode(message)) == message


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        b"\x93\xa6Submit\x01",
        msgspec.msgpack.encode(BEAT),  # of another channel
        msgspec.msgpack.encode({"uid": 7}),
        msgspec.msgpack.encode(["Abort", "seven"]),
        b"\x92\xa5Abort" + b"\xff" * 3,
        b"cos\nsystem\n(S'true'\ntR.",  # a pickle
    ],
)
def test_what_is_no_message_is_logged_and_dropped(data: bytes, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR, "gapless.ipc"):
        assert Decoder(SCHEDULER)(data) is None
    assert f"{len(data)} bytes on channel scheduler" in caplog.text


def test_columns() -> None:
    assert int32s(column([1, -1], "<i4")).tolist() == [1, -1]
    assert int64s(column(np.arange(6)[::2], "<i8")).tolist() == [0, 2, 4]
    assert uint8s(column([Finish.FAILED], "u1")).tolist() == [5]
    assert column([], "<i4") == b""
    assert column(np.array([1], ">i4"), "<i4") == b"\1\0\0\0"


@pytest.mark.parametrize(
    "message",
    [
        Submit(1, b"", SamplingParams(), (2**40,), 0),
        Submit(1, b"", SamplingParams(), (), 2**63),
        Submit(1, b"", SamplingParams(top_k=2**40), (), 0),
        Submit(1, b"", SamplingParams(max_new_tokens=-5), (), 0),
        Stop(2**40, 0, 1),
        Stop(1, 0, 0),
    ],
)
def test_numbers_that_no_array_can_hold_do_not_reach_the_scheduler(message: Submit | Stop) -> None:
    assert Decoder(SCHEDULER)(encode(message)) is None
