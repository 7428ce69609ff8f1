"""`gapless demo`: the real server, seen through its HTTP interface with nothing but the standard library."""

from __future__ import annotations

import contextlib
import dataclasses
import http.client
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from gapless.runtime.core.child import set_parent_death_signal
from gapless.runtime.core.config import ServerConfig
from gapless.runtime.core.errors import InternalError
from gapless.runtime.core.keys import VARIABLES
from gapless.runtime.core.options import command_line

PROMPT = """\
The lighthouse on Farrow Head was built in 1871, after three ships had been lost on the reef in a single winter. \
Its tower is of grey granite, thirty-one metres high, and for more than a century two keepers lived there with their \
families, a small garden and a great many books. They wound the clockwork every four hours, trimmed the lamp, wrote \
down the weather at dawn and at dusk, and rang the bell when fog came in from the west. In 1988 the light was made \
automatic and the last keeper, Edith Marlow, moved to the village below. She took the logbooks with her. There are \
ninety-four of them, and together they hold the longest unbroken record of the weather on that coast. Students now \
come every summer to copy them out, page by page.
"""
ENDINGS = (
    "\nOne of the pages that the students like best says that",
    "\nEdith Marlow told the students that",
)
LOAD_SECONDS = 600.0
ANSWER_SECONDS = 300.0


@dataclass(frozen=True)
class Answer:
    """`ttft` is the time to the first token in seconds, `rate` the tokens per second after it."""

    ttft: float
    rate: float
    prompt_tokens: int
    cached_tokens: int


def demo(config: ServerConfig, max_new_tokens: int) -> int:
    """Starts a server on a free port, streams two completions that share a prefix, stops it. Returns 0.

    Raises InternalError for whatever goes wrong; the server never outlives the call.
    """
    started = time.monotonic()
    config = dataclasses.replace(config, host="127.0.0.1", port=0, incremental_streaming_output=False)
    with _server(config) as (server, port):
        _wait_until_healthy(server, port, started)
        load_seconds = time.monotonic() - started
        print(PROMPT, end="")
        cold = _complete(port, PROMPT, ENDINGS[0], max_new_tokens)
        print("\nThe same text with another ending:")
        warm = _complete(port, PROMPT, ENDINGS[1], max_new_tokens)
    print(
        f"\nload {load_seconds:.1f} s, TTFT {cold.ttft:.2f} s cold and {warm.ttft:.2f} s with the prefix cached, "
        f"{(cold.rate + warm.rate) / 2:.1f} tokens/s"
    )
    return 0


@contextlib.contextmanager
def _server(config: ServerConfig) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """`gapless serve` on a free port, and that port. Leaving stops it and checks its exit code."""
    server = subprocess.Popen(
        [sys.executable, "-P", "-m", "gapless.runtime.cli", "serve", *command_line(config)],
        env={name: value for name, value in os.environ.items() if name not in VARIABLES.values()},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,  # Ctrl-C comes to us; we stop the server
        preexec_fn=lambda: set_parent_death_signal(signal.SIGTERM),
    )
    assert server.stdout is not None
    try:
        line = server.stdout.readline()
        if "http://" not in line:
            raise InternalError(f"the server did not start: exit code {server.wait()}")
        yield server, int(line.rsplit(":", 1)[1])
        server.terminate()
        if code := server.wait(config.drain_timeout + 10):
            raise InternalError(f"the server did not stop cleanly: exit code {code}")
    finally:
        server.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            server.wait(5)
        server.kill()
        server.wait()
        server.stdout.close()


def _wait_until_healthy(server: subprocess.Popen[str], port: int, started: float) -> None:
    """Shows how long the model has been loading, until /health answers 200."""
    shown = 0
    while True:
        elapsed = time.monotonic() - started
        with contextlib.suppress(OSError), contextlib.closing(_connect(port, timeout=5)) as connection:
            connection.request("GET", "/health")
            if connection.getresponse().status == 200:
                print(f"loaded in {elapsed:.1f} s\n", flush=True)
                return
        if server.poll() is not None:
            raise InternalError(f"the server ended while loading: exit code {server.returncode}")
        if elapsed > LOAD_SECONDS:
            raise InternalError(f"the model did not load within {LOAD_SECONDS:.0f} s")
        if elapsed >= shown + 2:
            shown = int(elapsed)
            print(f"loading the model ... {shown} s", flush=True)
        time.sleep(0.1)


def _complete(port: int, prefix: str, ending: str, max_new_tokens: int) -> Answer:
    """Streams one completion to the terminal."""
    params = {"max_new_tokens": max_new_tokens, "temperature": 0.6, "sampling_seed": 1}
    print(ending, end="", flush=True)
    sent = time.monotonic()
    first = last = 0.0
    shown, meta = "", {}
    for event in _stream(port, {"text": prefix + ending, "sampling_params": params, "stream": True}):
        last = time.monotonic()
        first = first or last
        print(event["text"].removeprefix(shown), end="", flush=True)
        shown, meta = event["text"], event["meta_info"]
    if not meta:
        raise InternalError("the server ended a stream without a token")
    answer = Answer(
        first - sent,
        (meta["completion_tokens"] - 1) / max(last - first, 1e-9),
        meta["prompt_tokens"],
        meta["cached_tokens"],
    )
    print(
        f"\n  [{answer.prompt_tokens} prompt tokens, cached_tokens {answer.cached_tokens}, TTFT {answer.ttft:.2f} s]"
    )
    return answer


def _stream(port: int, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The events of POST /generate; raises InternalError for an error or a stream that breaks off."""
    with contextlib.closing(_connect(port, timeout=ANSWER_SECONDS)) as connection:
        try:
            connection.request("POST", "/generate", json.dumps(body), {"Content-Type": "application/json"})
            response = connection.getresponse()
            if response.status != 200:
                raise InternalError(
                    f"POST /generate: {response.status} {response.read().decode(errors='replace')}"
                )
            for line in response:
                if not line.startswith(b"data: "):
                    continue
                data = line.removeprefix(b"data: ").strip()
                if data == b"[DONE]":
                    return
                event = json.loads(data)
                if "error" in event:
                    raise InternalError(f"POST /generate: {event['error']['message']}")
                yield event
        except (OSError, http.client.HTTPException) as error:
            raise InternalError(f"POST /generate: {error!r}") from error
    raise InternalError("POST /generate: the stream ended without [DONE]")


def _connect(port: int, timeout: float) -> http.client.HTTPConnection:
    return http.client.HTTPConnection("127.0.0.1", port, timeout=timeout)
