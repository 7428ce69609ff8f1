"""Aborts and timeouts on the real server, with and without overlap."""

from __future__ import annotations

import threading
from typing import Any

import httpx
import pytest

LONG = {"max_new_tokens": 1500, "ignore_eos": True}
SHORT = {"max_new_tokens": 4, "ignore_eos": True}
MODES = pytest.mark.parametrize("mode", [(), ("--disable-overlap-schedule",)], ids=["overlap", "synchronous"])
OPTIONS = ("--toy=delay_ms=10", "--max-running-requests=1")


class Answer(threading.Thread):
    """A POST /generate on a thread of its own."""

    def __init__(self, server: Any, **body: Any) -> None:
        super().__init__(daemon=True)
        self._server, self._body = server, body
        self.response: httpx.Response
        self.start()

    def run(self) -> None:
        self.response = self._server.generate(**self._body)

    def wait(self) -> httpx.Response:
        self.join(30)
        assert not self.is_alive()
        return self.response


def abort(server: Any, **body: Any) -> int:
    response = httpx.post(f"{server.url}/abort_request", json=body, timeout=10)
    assert response.status_code == 200
    return int(response.json()["aborted"])


@MODES
def test_abort_by_id_reaches_the_running_and_the_queued(serve: Any, mode: tuple[str, ...]) -> None:
    """`a` runs, `ab` and samples of `n` wait; each is ended by its own id, and the pool is whole afterwards."""
    server = serve(*OPTIONS, *mode)
    running = server.stream(text="x", rid="a", sampling_params=LONG)
    running.wait_first()
    queued = Answer(server, text="y", rid="ab", sampling_params=LONG)
    samples = Answer(server, text="z", rid="n", sampling_params=LONG | {"n": 2})
    server.wait_info("waiting", 3)
    assert abort(server, rid="n") == 2
    for answer in samples.wait().json():
        assert answer["meta_info"]["finish_reason"]["type"] == "abort"
        assert answer["text"] == ""
    server.wait_info("waiting", 1)
    assert abort(server, rid="a") == 1
    running.wait_end()
    assert running.done
    last = running.events[-1]["meta_info"]
    assert last["finish_reason"]["type"] == "abort"
    assert 0 < last["completion_tokens"] < 1500
    server.wait_info("running", 1)
    assert abort(server, rid="ab") == 1
    assert queued.wait().json()["meta_info"]["finish_reason"]["type"] == "abort"
    assert abort(server, rid="nobody") == 0
    assert (
        server.generate(text="x", rid="a", sampling_params=SHORT).json()["meta_info"]["completion_tokens"]
        == 4
    )


@MODES
def test_abort_all(serve: Any, mode: tuple[str, ...]) -> None:
    server = serve(*OPTIONS, *mode)
    streams = [server.stream(text=text, sampling_params=LONG) for text in "abc"]
    server.wait_info("live_requests", 3)
    assert abort(server, abort_all=True) == 3
    for stream in streams:
        stream.wait_end()
        assert stream.events[-1]["meta_info"]["finish_reason"]["type"] == "abort"
    server.wait_idle()
    assert server.generate(text="d", sampling_params=SHORT).status_code == 200


@MODES
def test_a_timeout_ends_the_running_and_the_queued(serve: Any, mode: tuple[str, ...]) -> None:
    server = serve(*OPTIONS, *mode)
    running = Answer(server, text="x", sampling_params=LONG, timeout=2)
    server.wait_info("running", 1)
    queued = server.generate(text="y", sampling_params=LONG, timeout=0.1)
    assert (queued.status_code, queued.json()["error"]["code"]) == (408, "timeout")
    answer = running.wait().json()
    assert answer["meta_info"]["finish_reason"]["message"] == "the request's timeout of 2 s is over"
    assert 0 < answer["meta_info"]["completion_tokens"] < 1500
    server.wait_idle()
