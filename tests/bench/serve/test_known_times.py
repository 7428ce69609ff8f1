"""`gapless bench serve` against a server whose times are known: what is reported is what happened (section G)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from scripted_server import scripted_server

from gapless.runtime.core.errors import ConfigError

from .serving import bench_serve, requests_of

ONE = ("--num-prompts", "1", "--random-input-len", "6", "--random-range-ratio", "1")
# Where each token's gap and the texts are kept, too.
DETAILS = (*ONE, "--output-details")
BACKENDS = ("gapless", "sglang", "vllm", "openai", "router")


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with scripted_server() as url:
        yield url


@pytest.fixture(params=[0.05, pytest.param(0.002, marks=pytest.mark.slow)])
def near(request: pytest.FixtureRequest) -> Any:
    """Compares milliseconds: closely where the machine is quiet, else closely enough to tell definitions apart."""
    return lambda value: pytest.approx(value, abs=1000 * request.param)


def scripted(url: str, directory: Path, script: dict[str, Any], *options: str) -> tuple[dict[str, Any], Any]:
    """The report of a run whose requests all follow `script`, and the server's log of it."""
    body = json.dumps({"script": script})
    code, report = bench_serve(url, directory, "--extra-request-body", body, *options)
    assert code == (0 if report["completed"] else 1)
    return report, requests_of(url, report)


@pytest.fixture(autouse=True)
def fresh_log(url: str) -> None:
    httpx.post(f"{url}/log")


@pytest.mark.parametrize("backend", BACKENDS)
def test_times_and_their_definitions(url: str, tmp_path: Path, near: Any, backend: str) -> None:
    """Cases 107 and 108: the first token's time is not one between tokens; TPOT is (E2E - TTFT) / (n - 1)."""
    script = {"chunks": [[0.3, 1], [0.35, 1], [0.45, 1]], "end": 0.6}
    report, (request,) = scripted(
        url, tmp_path, script, *DETAILS, "--backend", backend, "--random-output-len", "3"
    )
    times = 1000 * (np.array([at for at, _ in request["writes"]]) - request["received"])
    assert report["median_ttft_ms"] == near(times[0])
    assert report["median_e2e_latency_ms"] == near(times[2])
    assert report["median_tpot_ms"] == near((times[2] - times[0]) / 2)
    assert 1000 * np.array(report["runs"][0]["details"]["itls"][0]) == near(np.diff(times[:3]))
    assert (report["completed"], report["total_input_tokens"], report["total_output_tokens"]) == (1, 6, 3)
    assert report["duration"] * 1000 == near(times[-1])
    assert "TPOT" in report["definitions"]


@pytest.mark.parametrize("backend", BACKENDS)
def test_one_token_has_no_time_per_output_token(url: str, tmp_path: Path, backend: str) -> None:
    report, _ = scripted(
        url, tmp_path, {"chunks": [[0.0, 1]]}, *ONE, "--backend", backend, "--random-output-len", "1"
    )
    assert (report["median_tpot_ms"], report["median_itl_ms"], report["single_token"]) == (None, None, 1)
    assert report["median_ttft_ms"] == report["median_e2e_latency_ms"]


@pytest.mark.parametrize("backend", BACKENDS)
def test_several_tokens_in_a_chunk(url: str, tmp_path: Path, near: Any, backend: str) -> None:
    """Case 109: counts are the server's; a gap is shared among its chunk's tokens; chunk gaps have their own name."""
    script = {"chunks": [[0.1, 3], [0.2, 1], [0.4, 4]]}
    report, (request,) = scripted(
        url, tmp_path, script, *DETAILS, "--backend", backend, "--random-output-len", "8"
    )
    first, second = 1000 * np.diff([at for at, _ in request["writes"][:3]])
    assert 1000 * np.array(report["runs"][0]["details"]["itls"][0]) == near([first, *[second / 4] * 4])
    assert (report["min_chunk_gap_ms"], report["max_chunk_gap_ms"]) == (near(first), near(second))
    assert report["median_tpot_ms"] == near((first + second) / 7)
    assert (report["total_output_tokens"], report["total_output_tokens_retokenized"]) == (8, 8)


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_empty_chunk_is_no_first_token(url: str, tmp_path: Path, near: Any, backend: str) -> None:
    """Case 111."""
    script = {"chunks": [[0.0, "role"], [0.05, "empty"], [0.3, 1], [0.4, 1]]}
    options = ("--chat",) if backend == "openai" else ()
    report, (request,) = scripted(
        url, tmp_path, script, *ONE, *options, "--backend", backend, "--random-output-len", "2"
    )
    assert report["median_ttft_ms"] == near(1000 * (request["writes"][2][0] - request["received"]))


@pytest.mark.parametrize("backend", BACKENDS)
def test_answers_that_stop_early_are_shown(url: str, tmp_path: Path, backend: str) -> None:
    """Case 112: EOS is to be ignored where the API has a word for that, and what came is told from what was asked."""
    script = {"chunks": [[0.0, 1], [0.01, 2]], "finish_reason": "stop"}
    report, (request,) = scripted(
        url, tmp_path, script, *ONE, "--backend", backend, "--random-output-len", "8"
    )
    body = request["body"]
    ignore = body["sampling_params"]["ignore_eos"] if "sampling_params" in body else body.get("ignore_eos")
    assert ignore is (None if backend == "openai" else True)
    assert (report["total_output_tokens"], report["asked_output_tokens"], report["early_stops"]) == (3, 8, 1)
    assert any("output tokens: 3 instead of 8" in warning for warning in report["warnings"])


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_warm_cache_is_noticed(url: str, tmp_path: Path, backend: str) -> None:
    """Case 113."""
    script = {"cached_tokens": 5, "chunks": [[0.0, 1]]}
    report, _ = scripted(url, tmp_path, script, *ONE, "--backend", backend, "--random-output-len", "1")
    assert (report["cached_tokens"], report["cache_hit_rate"]) == (5, 5 / 6)
    assert any("it was warm" in warning for warning in report["warnings"])


def test_hits_within_a_load_are_no_warm_cache(url: str, tmp_path: Path) -> None:
    shared = (
        "--dataset-name",
        "generated-shared-prefix",
        "--gsp-num-groups",
        "1",
        "--gsp-prompts-per-group",
        "3",
    )
    lengths = ("--gsp-system-prompt-len", "20", "--gsp-question-len", "5", "--gsp-output-len", "1")
    script = {"cached_tokens": 20, "chunks": [[0.0, 1]]}
    report, _ = scripted(url, tmp_path, script, *shared, *lengths)
    explained = report["explained_cached_tokens"]
    assert 40 <= explained < 60  # the prefix twice, and what questions may have in common by chance
    assert any("it was warm" in warning for warning in report["warnings"])
    report, _ = scripted(url, tmp_path, script | {"cached_tokens": 13}, *shared, *lengths)
    assert not any("warm" in warning for warning in report["warnings"])


def test_warm_up_requests_are_not_counted(url: str, tmp_path: Path) -> None:
    """Case 115: and their prompts are not those of the run."""
    options = (
        "--num-prompts",
        "4",
        "--random-input-len",
        "30",
        "--random-output-len",
        "2",
        "--warmup-requests",
        "3",
    )
    code, report = bench_serve(url, tmp_path, *options)
    log = requests_of(url, report)
    assert (code, report["completed"], len(log)) == (0, 4, 7)
    prompts = [tuple(request["body"]["input_ids"]) for request in log]
    assert len(set(prompts)) == 7


def test_the_time_is_up(url: str, tmp_path: Path) -> None:
    """Case 116: each request stands in one bucket, and those that hang do not keep the run."""
    scripts = [{}, {"chunks": [[0.0, 1]]}, {"chunks": [[0.0, 2]], "hang": True}]
    with scripted_server(scripts) as mixed:
        options = (
            "--num-prompts",
            "200",
            "--random-output-len",
            "3",
            "--request-rate",
            "40",
            "--duration",
            "0.6",
        )
        code, report = bench_serve(mixed, tmp_path, *options)
        log = requests_of(mixed, report)
    assert (code, report["failed"]) == (0, 0)
    assert report["completed"] and report["cut"]
    assert report["completed"] + report["cut"] == len(log) == 200 - report["unsent"]
    assert report["total_output_tokens"] + report["cut_output_tokens"] <= 3 * len(log)


def test_failed_requests_are_counted_and_have_no_latency(url: str, tmp_path: Path) -> None:
    """Case 118."""
    slow_failures = [{"status": 503, "end": 0.3}, {"chunks": [[0.0, 1], [0.3, 1]], "drop_after": 1}]
    scripts = [{"chunks": [[0.0, 1]]}, *slow_failures, {"chunks": [[0.0, 1], [0.3, 1]], "fail_after": 1}]
    with scripted_server(scripts) as mixed:
        code, report = bench_serve(mixed, tmp_path, "--num-prompts", "8", "--random-output-len", "2")
    assert (code, report["completed"], report["failed"]) == (0, 2, 6)
    assert sum(report["error_counts"].values()) == 6 and len(report["error_counts"]) >= 3
    assert report["total_output_tokens"] == 2
    assert report["request_throughput"] == pytest.approx(2 / report["duration"])


def test_when_all_fail_the_exit_code_says_so(tmp_path: Path) -> None:
    scripts = [{}, *[{"status": 500}] * 3]
    with scripted_server(scripts) as failing:
        code, report = bench_serve(failing, tmp_path, "--num-prompts", "3")
    assert (code, report["completed"], report["failed"], report["median_ttft_ms"]) == (1, 0, 3, None)


def test_goodput_counts_those_that_keep_all_limits(tmp_path: Path) -> None:
    """Case 118: fast first token and slow tokens, the other way round, and both fast."""
    good = {"chunks": [[0.0, 1], [0.1, 1]]}
    scripts = [good, {"chunks": [[0.0, 1], [1.0, 1]]}, {"chunks": [[1.0, 1], [1.1, 1]]}]
    with scripted_server(scripts) as mixed:
        options = ("--num-prompts", "6", "--random-output-len", "2", "--goodput", "ttft:600", "tpot:600")
        _, report = bench_serve(mixed, tmp_path, *options)
    assert report["goodput_share"] == pytest.approx(2 / 6)
    assert report["goodput"] == pytest.approx(2 / report["duration"])


def test_the_rate_that_is_asked_for_is_the_rate_that_comes(url: str, tmp_path: Path, near: Any) -> None:
    options = (
        "--num-prompts",
        "20",
        "--random-output-len",
        "1",
        "--request-rate",
        "50",
        "--burstiness",
        "inf",
    )
    _, report = bench_serve(url, tmp_path, *options)
    received = np.array([request["received"] for request in requests_of(url, report)])
    assert 1000 * (received - received[0]) == near(20.0 * np.arange(20))


def test_a_limit_on_concurrency_holds(url: str, tmp_path: Path) -> None:
    script = {"chunks": [[0.0, 1], [0.02, 1]]}
    report, log = scripted(
        url, tmp_path, script, "--num-prompts", "9", "--random-output-len", "2", "--max-concurrency", "3"
    )
    ends = sorted((request["writes"][-1][0], -1) for request in log)
    running = np.cumsum([step for _, step in sorted([*ends, *((request["received"], 1) for request in log)])])
    assert (report["completed"], running.max()) == (9, 3)


def test_trace_options_and_a_search_do_not_mix(url: str, tmp_path: Path) -> None:
    lines = tmp_path / "lines.jsonl"
    lines.write_text('{"prompt": "ab", "timestamp": 0.0}\n')
    options = (
        "--dataset-name",
        "custom",
        "--dataset-path",
        str(lines),
        "--find-max-rate",
        "--goodput",
        "ttft:9",
    )
    with pytest.raises(ConfigError, match="--find-max-rate"):
        bench_serve(url, tmp_path, *options)
