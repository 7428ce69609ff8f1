"""The cache is flushed at rest and only then, through the real server and the offline engine."""

import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from gapless import Engine
from gapless.runtime.core.errors import UnavailableError

PARAMS = {"max_new_tokens": 4, "ignore_eos": True}
PROMPT = "a shared prefix of more than two pages of sixteen tokens"
CACHED = len(PROMPT) // 16 * 16


def flush(server: Any, **query: Any) -> httpx.Response:
    return httpx.post(f"{server.url}/flush_cache", params=query, timeout=60)


def cached_tokens(server: Any) -> int:
    return int(server.generate(text=PROMPT, sampling_params=PARAMS).json()["meta_info"]["cached_tokens"])


@pytest.mark.parametrize("options", [(), ("--disable-overlap-schedule",), ("--num-scheduler-steps=4",)])
def test_right_after_a_response(serve, options: tuple[str, ...]) -> None:
    """Over and over: the steps still in flight refuse nobody, and the prefix is computed anew each time."""
    server = serve(*options)
    assert cached_tokens(server) == 0
    assert cached_tokens(server) == CACHED
    for _ in range(8):
        flushed = flush(server)
        assert flushed.status_code == 200, flushed.text
        assert flushed.json()["pages"] > 0
        assert cached_tokens(server) == 0
    assert flush(server).json()["pages"] > 0
    assert flush(server).json()["pages"] == 0


def test_right_after_a_stop_string(serve) -> None:
    """The detokenizer answers the client before the scheduler knows that the request has ended."""
    server = serve("--toy=delay_ms=5")
    text = server.generate(text=PROMPT, sampling_params=PARAMS).json()["text"]
    params = {"max_new_tokens": 1000, "ignore_eos": True, "stop": [text[:1]]}
    for _ in range(5):
        assert server.generate(text=PROMPT, sampling_params=params).json()["text"] == ""
        assert flush(server).status_code == 200


def test_during_a_stream(serve) -> None:
    """409 with the counts; the stream goes on and ends as if nothing had been asked."""
    server = serve("--toy=delay_ms=10", "--max-running-requests=1")
    stream = server.stream(text=PROMPT, sampling_params={"max_new_tokens": 200, "ignore_eos": True})
    stream.wait_first()
    with ThreadPoolExecutor(1) as pool:
        queued = pool.submit(server.generate, text="b", sampling_params=PARAMS)
        server.wait_info("waiting", 1)
        for query in ({}, {"timeout": 0.1}):
            refused = flush(server, **query)
            assert refused.status_code == 409
            assert "(running requests: 1, waiting: 1)" in refused.json()["error"]["message"]
        stream.wait_end()
        assert stream.events[-1]["meta_info"]["completion_tokens"] == 200
        assert queued.result(30).status_code == 200
    assert flush(server).status_code == 200
    assert cached_tokens(server) == 0


def test_a_timeout_waits_for_the_stream(serve) -> None:
    server = serve("--toy=delay_ms=5")
    stream = server.stream(text=PROMPT, sampling_params={"max_new_tokens": 100, "ignore_eos": True})
    stream.wait_first()
    assert not stream.done
    assert flush(server, timeout=60).status_code == 200
    stream.wait_end()
    assert stream.events[-1]["meta_info"]["completion_tokens"] == 100
    assert cached_tokens(server) == 0


def test_many_at_once(serve) -> None:
    """Flushes among requests: each is answered, none with an error of the server, and all ids are right."""
    server = serve("--toy=delay_ms=1")
    start = threading.Barrier(8)

    def work(number: int) -> list[int]:
        start.wait(30)
        if number % 2:
            return [server.generate(text=PROMPT, sampling_params=PARAMS).status_code for _ in range(5)]
        return [flush(server, timeout=number / 10).status_code for _ in range(5)]

    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(work, range(8)))
    assert {code for codes in results[1::2] for code in codes} == {200}
    assert {code for codes in results[::2] for code in codes} <= {200, 409}
    assert flush(server).status_code == 200


def test_a_dead_engine(serve) -> None:
    server = serve("--toy=delay_ms=20")
    stream = server.stream(text="a", sampling_params={"max_new_tokens": 1500, "ignore_eos": True})
    stream.wait_first()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(flush, server, timeout=60)
        assert flush(server).status_code == 409  # the one above has come, too, or comes to a dead engine
        server.children()["scheduler"].send(signal.SIGKILL)
        assert waiting.result(30).status_code in (500, 503)
    server.wait_health(503, seconds=5)
    assert flush(server).status_code == 503
    stream.wait_end()
    assert server.wait(5) == 1


def test_the_engine_flushes() -> None:
    with Engine("toy", toy="delay_ms=10") as engine:
        long = {"max_new_tokens": 100, "ignore_eos": True}

        def cached() -> int:
            return int(engine.generate(PROMPT, PARAMS)["meta_info"]["cached_tokens"])

        assert [cached(), cached()] == [0, CACHED]
        assert engine.flush_cache()
        assert cached() == 0
        stream = engine.generate(PROMPT, long, stream=True)
        next(stream)
        refused = engine.flush_cache()
        assert not refused
        assert "(running requests: 1, waiting: 0)" in refused.message
        assert engine.flush_cache(timeout=60).pages > 0
        assert list(stream)[-1]["meta_info"]["completion_tokens"] == 100
        assert cached() == 0
    with pytest.raises(UnavailableError):
        engine.flush_cache()


def test_a_shutdown_ends_a_flush_that_waits() -> None:
    with Engine("toy", toy="delay_ms=10") as engine, ThreadPoolExecutor(1) as pool:
        stream = engine.generate("a", {"max_new_tokens": 1500, "ignore_eos": True}, stream=True)
        next(stream)
        waiting = pool.submit(engine.flush_cache, 60)
        next(stream)
        engine.shutdown()
        assert isinstance(waiting.exception(timeout=20), UnavailableError)
