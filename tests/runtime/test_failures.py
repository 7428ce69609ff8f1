"""A process that dies or hangs is never hidden: streams end with an error, /health and the exit code say so."""

import signal

import httpx
import pytest

LONG = {"max_new_tokens": 400, "ignore_eos": True}
SLOW = "--toy=delay_ms=20"
MODES = pytest.mark.parametrize("mode", [(), ("--disable-overlap-schedule",)], ids=["overlap", "synchronous"])


@MODES
@pytest.mark.parametrize("victim", ["scheduler", "detokenizer"])
def test_a_killed_process_ends_every_stream_and_the_server(serve, victim: str, mode: tuple[str, ...]) -> None:
    """Within 3 s: an error event in each of three streams, 503 for new requests, exit non-zero, one clear line."""
    server = serve(SLOW, *mode)
    streams = [server.stream(text=text, sampling_params=LONG) for text in "abc"]
    for stream in streams:
        stream.wait_first()
    children = server.children()
    children[victim].send(signal.SIGKILL)
    server.wait_health(503, seconds=1.5)
    assert server.generate(text="d").status_code == 503
    for stream in streams:
        stream.wait_end(3)
        assert stream.events[-1]["error"]["code"] == "internal_error"
    assert server.wait(5) == 1
    assert f"gapless: the {victim} process died: killed by SIGKILL" in server.log.splitlines()
    assert all(child.within(0) for child in children.values())


def test_a_killed_http_process_ends_the_server(serve) -> None:
    server = serve(SLOW)
    stream = server.stream(text="a", sampling_params=LONG)
    stream.wait_first()
    children = server.children()
    children["tokenizer_manager"].send(signal.SIGKILL)
    assert server.wait(5) == 1
    assert "gapless: the tokenizer_manager process died: killed by SIGKILL" in server.log.splitlines()
    assert all(child.within(0) for child in children.values())
    stream.wait_end()
    assert not stream.done
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{server.url}/health")


@pytest.mark.parametrize("victim", ["scheduler", "detokenizer"])
def test_a_process_that_hangs_shows_in_health_and_recovers(serve, victim: str) -> None:
    """/health follows a heartbeat that passes through both processes: 503 while one is stopped, 200 again after."""
    server = serve()
    child = server.children()[victim]
    child.send(signal.SIGSTOP)
    server.wait_health(503, seconds=5)
    child.send(signal.SIGCONT)
    server.wait_health(200, seconds=5)
    assert server.generate(text="a").status_code == 200


@MODES
def test_a_failed_step_ends_every_stream_and_the_server(serve, mode: tuple[str, ...]) -> None:
    """A device step that raises is fatal: no stream hangs, the exit code is 1, the log says what was raised."""
    server = serve("--toy=delay_ms=20,raise_at_step=30", *mode)
    streams = [server.stream(text=text, sampling_params=LONG) for text in "abc"]
    for stream in streams:
        stream.wait_end(10)
        assert stream.events[-1]["error"]["code"] == "internal_error"
    assert server.wait(5) == 1
    assert "told to fail at step 30" in server.log


@MODES
def test_a_step_that_hangs_is_fatal(serve, mode: tuple[str, ...]) -> None:
    """--watchdog-timeout bounds how long a step may take."""
    server = serve("--toy=delay_ms=60000", "--watchdog-timeout=1", *mode)
    stream = server.stream(text="a", sampling_params=LONG)
    stream.wait_end(15)
    assert server.wait(5) == 1
    assert "--watchdog-timeout" in server.log
