"""/health_generate and /metrics of the real server."""

from __future__ import annotations

import re
import signal
from typing import Any

import httpx
import pytest

MODES = pytest.mark.parametrize("mode", [(), ("--disable-overlap-schedule",)], ids=["overlap", "synchronous"])
SHORT = {"max_new_tokens": 4, "ignore_eos": True}


def probe(server: Any, seconds: float = 30) -> int:
    return httpx.get(f"{server.url}/health_generate", timeout=seconds).status_code


def metric(server: Any, name: str) -> float:
    text = httpx.get(f"{server.url}/metrics", timeout=5).text
    found = re.search(rf"^sglang:{name}\{{[^}}]*\}} (\S+)$", text, re.MULTILINE)
    assert found, text
    return float(found[1])


@MODES
def test_probes_leave_at_most_a_page_and_find_nothing(serve: Any, mode: tuple[str, ...]) -> None:
    """A page of one token, so that a probe's prompt would be cached; a prompt that begins with the same token."""
    server = serve("--page-size=1", *mode)
    assert [probe(server) for _ in range(20)] == [200] * 20
    answer = server.generate(input_ids=[0, 1, 2], sampling_params=SHORT).json()
    assert answer["meta_info"]["cached_tokens"] == 0
    server.wait_idle()
    freed = httpx.post(f"{server.url}/flush_cache", timeout=30).json()["pages"]
    assert freed == 3 + 4 - 1 + 1
    assert metric(server, "generation_tokens_total") == 20 + 4


@pytest.mark.parametrize("victim", ["scheduler", "detokenizer"])
def test_a_hung_process_is_503_in_bounded_time_and_recovers(serve: Any, victim: str) -> None:
    server = serve()
    child = server.children()[victim]
    child.send(signal.SIGSTOP)
    assert probe(server, seconds=10) == 503
    child.send(signal.SIGCONT)
    server.wait_health(200, seconds=10)
    assert probe(server) == 200


@pytest.mark.parametrize("victim", ["scheduler", "detokenizer"])
def test_a_killed_process_is_never_green(serve: Any, victim: str) -> None:
    """From the kill to the server's end no probe says 200, but for one that was answered before."""
    server = serve()
    children = server.children()
    children[victim].send(signal.SIGKILL)
    assert children[victim].within(5)
    seen = set()
    while server.process.poll() is None:
        try:
            seen.add(probe(server))
        except httpx.TransportError:
            break
    assert seen <= {500, 503}
    assert server.wait(10) == 1


def test_a_preemption_is_counted(serve: Any) -> None:
    """Six requests that outgrow the pool together."""
    server = serve("--max-total-tokens=128", "--page-size=4", "--disable-radix-cache", "--toy=delay_ms=2")
    params = {"max_new_tokens": 60, "ignore_eos": True}
    answers = server.generate(text=[f"prompt {i}" for i in range(6)], sampling_params=params).json()
    assert [answer["meta_info"]["completion_tokens"] for answer in answers] == [60] * 6
    server.wait_idle()
    assert metric(server, "num_retracted_reqs") > 0


def test_metrics_count_what_was_served(serve: Any) -> None:
    server = serve()
    for _ in range(2):
        assert server.generate(text="a" * 100, sampling_params=SHORT).status_code == 200
    assert metric(server, "num_requests_total") == 2
    assert metric(server, "generation_tokens_total") == 8
    assert metric(server, "prompt_tokens_total") == 200
    assert metric(server, "cached_tokens_total") == 96
    assert metric(server, "time_to_first_token_seconds_count") == 2
    assert metric(server, "inter_token_latency_seconds_count") == 6
    assert metric(server, "queue_time_seconds_count") == 2
    server.wait_info("running", 0)  # it is told by heartbeats
    assert metric(server, "num_running_reqs") == 0
