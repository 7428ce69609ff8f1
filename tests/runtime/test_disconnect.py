"""A client that closes its connection to the real server: its request ends at once, and what it held is free."""

from __future__ import annotations

import json
import socket
from typing import Any

import httpx
import pytest

LONG = {"max_new_tokens": 1500, "ignore_eos": True}
SHORT = {"max_new_tokens": 4, "ignore_eos": True}
ABORT_SECONDS = 1 + 2  # a busy machine has its share
# A step takes 20 ms: a request that nobody aborts holds its row for 30 s, far beyond what the tests wait for.
OPTIONS = (
    "--toy=delay_ms=20",
    "--max-running-requests=1",
    "--chunked-prefill-size=16",
    "--disable-radix-cache",
)


class Client:
    """A POST /generate on a socket of its own, which can be closed at any moment."""

    def __init__(self, url: str, **body: Any) -> None:
        address = httpx.URL(url)
        self._socket = socket.create_connection((address.host, address.port), timeout=30)
        content = json.dumps(body).encode()
        head = f"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: {len(content)}\r\n\r\n"
        self._socket.sendall(head.encode() + content)

    def wait_first(self) -> None:
        """Reads until the first event of a stream."""
        seen = b""
        while b"data: " not in seen:
            more = self._socket.recv(65536)
            assert more, f"the connection ended after {seen!r}"
            seen += more

    def close(self) -> None:
        self._socket.close()


@pytest.mark.parametrize("stream", [True, False])
def test_in_mid_decode(serve, stream: bool) -> None:
    server = serve(*OPTIONS)
    client = Client(server.url, text="a", sampling_params=LONG, stream=stream)
    if stream:
        client.wait_first()
    server.wait_info("running", 1)
    client.close()
    server.wait_info("running", 0, ABORT_SECONDS)
    server.wait_idle()
    assert server.generate(text="b", sampling_params=SHORT).status_code == 200


def test_during_prefill(serve) -> None:
    """1600 tokens in chunks of 16 take 100 steps, 2 s, before the first of as many tokens as fit."""
    server = serve(*OPTIONS)
    client = Client(server.url, text="a" * 1600, sampling_params=LONG, stream=True)
    server.wait_info("running", 1)
    client.close()
    server.wait_info("running", 0, ABORT_SECONDS)
    server.wait_idle()


def test_while_queued(serve) -> None:
    """Only the request of the client that went is ended; the one before it runs on."""
    server = serve(*OPTIONS)
    first = server.stream(text="a", sampling_params={"max_new_tokens": 200, "ignore_eos": True})
    first.wait_first()
    queued = Client(server.url, text="b", sampling_params=LONG)
    server.wait_info("waiting", 1)
    queued.close()
    server.wait_info("waiting", 0, ABORT_SECONDS)
    assert not first.done
    first.wait_end()
    assert first.done
    assert first.events[-1]["meta_info"]["completion_tokens"] == 200
    server.wait_idle()


def test_many_in_a_row(serve) -> None:
    """300 clients come and go; the log has no line about them, and the server serves on."""
    server = serve("--toy=delay_ms=1", "--max-running-requests=16")
    before = server.log
    for turn in range(300):
        client = Client(server.url, text=f"prompt {turn}", sampling_params=LONG, stream=bool(turn % 2))
        if turn % 6 == 1:
            client.wait_first()
        client.close()
    server.wait_idle(10)
    assert server.generate(text="b", sampling_params=SHORT).json()["meta_info"]["completion_tokens"] == 4
    assert server.log == before
