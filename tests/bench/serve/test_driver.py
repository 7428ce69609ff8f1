"""A run against servers that do not answer as they should: each such request fails by itself, and says why."""

from __future__ import annotations

import asyncio
import gzip
from functools import partial

import numpy as np
import pytest
from http_peer import Service, run_on, serving

from gapless.bench.serve import driver
from gapless.bench.serve.dialects import Asking
from gapless.bench.serve.driver import Driver, Load, Outcome
from gapless.bench.serve.progress import Progress
from gapless.bench.serve.record import Item
from gapless.runtime.core.sse import EventParser
from gapless.runtime.tokenizer.byte_tokenizer import ByteTokenizer

HEAD = b"HTTP/1.1 200 OK\r\nconnection: close\r\n"
EVENTS = HEAD + b"content-type: text/event-stream\r\n\r\n"
GOOD = b'data: {"text": "a", "meta_info": {"completion_tokens": 1, "finish_reason": {"type": "length"}}}\n\n'


def outcome_of(*answers: bytes) -> Outcome:
    """A run with a request for each of these answers, one after the other; each ends with its connection."""
    found: list[Outcome] = []

    async def answer(service: Service, left: list[bytes]) -> None:
        while True:
            peer = await service.accept()
            first, _, _ = await peer.request()
            await peer.send(left.pop(0) if "/generate" in first else HEAD + b"content-length: 0\r\n\r\n")
            await peer.close()

    async def test() -> None:
        async with serving() as service:
            answering = asyncio.create_task(answer(service, list(answers)))
            load = Load(
                [Item([1], 1, 1)] * len(answers), np.zeros(len(answers)), max_concurrency=1, timeout=20
            )
            progress = Progress(len(answers), enabled=False)
            asking = Asking(backend="gapless", model="m")
            found.append(await Driver(service.client, asking, load, ByteTokenizer(), progress).run())
            answering.cancel()

    run_on("uvloop", test())
    return found[0]


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (EVENTS + b"data: {\n\n", "not JSON"),
        (EVENTS + b"data: " + b"x" * 2000 + b"\n\n", "longer than 1000 bytes"),
        (EVENTS + b'data: {"meta_info": {"completion_tokens": "1"}}\n\n', "not of its kind"),
        (EVENTS, "the stream ended before the answer did"),
        (HEAD + b'content-type: application/json\r\n\r\n{"text": "a"}', "it came as application/json"),
        (
            HEAD + b"content-encoding: gzip\r\ncontent-type: text/event-stream\r\n\r\n" + gzip.compress(GOOD),
            "as gzip",
        ),
        (HEAD + b"\r\nok", "it came as no type"),
        (
            HEAD.replace(b"200 OK", b"307 Away") + b"location: https://there/\r\n\r\n",
            "it is at https://there/",
        ),
        (b"HTTP/1.1 429 Busy\r\nconnection: close\r\nretry-after: 1\r\n\r\n\xff", "429 \ufffd"),
    ],
)
def test_a_broken_answer_fails_its_request_alone(
    answer: bytes, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver, "EventParser", partial(EventParser, 1000))
    good, broken, last = outcome_of(EVENTS + GOOD, answer, EVENTS + GOOD).records
    assert (good.error, last.error) == ("", "")
    assert message in broken.error


def test_comments_that_keep_a_stream_alive_are_nothing() -> None:
    (record,) = outcome_of(EVENTS + b": ping\n\n:\n\n" + GOOD + b": ping\n\ndata: [DONE]\n\n").records
    assert (record.error, record.text, len(record.chunks)) == ("", "a", 1)
