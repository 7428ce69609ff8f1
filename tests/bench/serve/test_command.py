"""`gapless bench serve` as a whole: options, errors before any work, sweeps, reports, our own server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest
from scripted_server import scripted_server

from gapless.bench.serve import runner
from gapless.bench.serve.server import ServerError
from gapless.runtime.core.errors import ConfigError, GaplessError

from .serving import bench_serve, requests_of

RAMP = ["--ramp-up-strategy", "linear", "--ramp-up-start-rps", "1", "--ramp-up-end-rps", "2"]
SMALL = ("--num-prompts", "3", "--random-input-len", "8", "--random-output-len", "2")


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with scripted_server() as url:
        yield url


@pytest.fixture(autouse=True)
def fresh_log(url: str) -> None:
    httpx.post(f"{url}/log")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--goodput", "speed:5"], "speed"),
        (["--sweep", "request-rate=1,0"], "--sweep"),
        (["--sweep", "temperature=1"], "--sweep"),
        (["--sweep", "max-concurrency=1.5"], "--sweep"),
        (["--find-max-rate"], "--goodput"),
        (["--find-max-rate", "--goodput", "ttft:5", "--sweep", "request-rate=1"], "give one"),
        (["--repeat", "2", "--sweep", "request-rate=1"], "give one"),
        (["--plot", "out.pdf"], "--plot"),
        (["--extra-request-body", "[1]"], "--extra-request-body"),
        (["--extra-request-body", "{"], "--extra-request-body"),
        (["--extra-request-body", '{"n": 2}'], "--extra-request-body"),
        (["--extra-request-body", '{"stream": false}'], "--extra-request-body"),
        (["--extra-request-body", '{"seed": NaN}'], "--extra-request-body"),
        (["--extra-request-body", '{"sampling_params": 5}'], "--extra-request-body"),
        (["--extra-request-body", '{"sampling_params": {"n": 2}}'], "--extra-request-body"),
        (["--header", "nothing"], "--header"),
        (["--header", "x=a\rb"], "--header"),
        ([*RAMP, "--sweep", "request-rate=1,2"], "--ramp-up-strategy"),
        ([*RAMP, "--find-max-rate", "--goodput", "ttft:5"], "--ramp-up-strategy"),
        (["--request-rate", "-1"], "--request-rate"),
        (["--temperature", "nan"], "--temperature"),
        (["--request-timeout", "0"], "--request-timeout"),
        (["--slo-share", "1.5"], "--slo-share"),
        (["--tokenizer", "/nowhere"], "/nowhere"),
        (["--base-url", "ftp://somewhere"], "--base-url"),
        (["--model", "another"], "--model another"),
    ],
)
def test_a_wrong_option_is_named_and_nothing_is_sent(
    url: str, tmp_path: Path, options: list[str], message: str
) -> None:
    with pytest.raises(GaplessError, match=message):
        bench_serve(url, tmp_path, *options)
    assert httpx.get(f"{url}/log").json() == []


def test_a_server_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ServerError, match="does not answer"):
        bench_serve("http://127.0.0.1:9", tmp_path)


def test_a_server_that_refuses(tmp_path: Path) -> None:
    with scripted_server({"status": 401}) as refusing, pytest.raises(ServerError, match="401"):
        bench_serve(refusing, tmp_path, *SMALL)


def test_a_server_whose_tokenizer_is_elsewhere(url: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--tokenizer"):
        bench_serve(url, tmp_path, *SMALL, "--tokenizer", "")


def test_the_report_is_one_line_of_json_with_the_keys_of_sglang(url: str, tmp_path: Path) -> None:
    _, report = bench_serve(url, tmp_path, *SMALL)
    assert len((tmp_path / "report.json").read_text().splitlines()) == 1
    statistics = {f"{s}_{n}_ms" for s in ("mean", "median", "std", "p90", "p95", "p99")
                  for n in ("ttft", "tpot", "itl", "e2e_latency")}  # fmt: skip
    rates = {f"{name}_throughput" for name in ("request", "input", "output", "total")}
    counts = {"duration", "completed", "total_input_tokens", "total_output_tokens", "concurrency", "goodput"}
    assert statistics | rates | counts | {"backend", "dataset_name", "request_rate"} <= report.keys()
    assert {"machine", "versions", "device", "commit", "model", "options", "seed"} <= report.keys()
    assert report["model"] == "scripted" and report["request_rate"] == "inf"


def test_the_report_is_json_to_every_reader(url: str, tmp_path: Path) -> None:
    """Python alone reads Infinity."""
    bench_serve(url, tmp_path, *SMALL, "--burstiness", "inf")
    report = orjson.loads((tmp_path / "report.json").read_bytes())
    assert report["options"]["request_rate"] == report["options"]["burstiness"] == "inf"


def test_a_base_url_may_end_as_openais_does(url: str, tmp_path: Path) -> None:
    code, report = bench_serve(f"{url}/v1/", tmp_path, *SMALL, "--backend", "openai")
    assert (code, report["completed"]) == (0, 3)


def test_a_plot_that_could_not_be_written_is_an_error_before_the_work(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = tmp_path / "plot.html"
    directory.mkdir()
    with pytest.raises(SystemExit):
        bench_serve(url, tmp_path, *SMALL, "--plot", str(directory))
    assert "Is a directory" in capsys.readouterr().err
    assert httpx.get(f"{url}/log").json() == []


def test_a_warm_up_that_failed_is_said(tmp_path: Path) -> None:
    with scripted_server([{}, {"status": 503}, {}, {}, {}]) as cold:
        _, report = bench_serve(cold, tmp_path, *SMALL, "--warmup-requests", "1")
    assert report["failed"] == 0
    assert report["warnings"][0] == "failed warm-up requests: 1 of 1; one of them: 503 as scripted"


def test_keys_are_sent_and_kept_out_of_the_report(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GAPLESS_API_KEY", "a secret")
    _, report = bench_serve(url, tmp_path, *SMALL, "--header", "x-team=another secret")
    assert {request["authorization"] for request in requests_of(url, report)} == {"Bearer a secret"}
    assert "secret" not in json.dumps(report)


def test_a_sweep_makes_a_run_for_each_value(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plot = tmp_path / "sweep.html"
    _, report = bench_serve(url, tmp_path, *SMALL, "--sweep", "max-concurrency=1,2", "--plot", str(plot))
    assert [point["max_concurrency"] for point in report["points"]] == [1, 2]
    assert [point["seed"] for point in report["points"]] == [1, 2]
    assert "<svg" in plot.read_text() and "http" not in plot.read_text().split("</style>")[0]
    assert capsys.readouterr().out.count("\n") >= 3
    prompts = [tuple(request["body"]["input_ids"]) for request in requests_of(url, report)]
    assert len(set(prompts)) == len(prompts) == 6


def test_the_search_reports_what_it_tried(tmp_path: Path) -> None:
    with scripted_server({"chunks": [[0.0, 1], [0.2, 1]]}) as slow:
        limits = ("--find-max-rate", "--goodput", "tpot:50")
        _, report = bench_serve(slow, tmp_path, *SMALL, *limits)
    assert report["max_rate"] == 0.0
    assert len(report["points"]) > 1 and all(point["goodput_share"] == 0 for point in report["points"])


def test_repeated_runs_give_their_medians(url: str, tmp_path: Path) -> None:
    _, report = bench_serve(url, tmp_path, *SMALL, "--repeat", "3")
    durations = sorted(figures["duration"] for figures in report["runs"])
    assert len(durations) == 3 and report["duration"] == durations[1]


def test_what_is_the_same_in_all_runs_is_kept(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, report = bench_serve(url, tmp_path, *SMALL, "--repeat", "2", "--goodput", "ttft:60000")
    assert (report["request_rate"], report["goodput_limits"]) == ("inf", {"ttft": 60000})
    assert "of the requests within ttft 60000 ms" in capsys.readouterr().out


def test_runs_that_are_over_are_kept_when_the_server_refuses_to_go_on(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    flushes = iter([None])

    async def flush(*_: object) -> None:
        if next(flushes, ServerError("busy")) is not None:
            raise ServerError("busy")

    monkeypatch.setattr(runner, "flush", flush)
    with pytest.raises(ServerError, match="busy"):
        bench_serve(url, tmp_path, *SMALL, "--sweep", "request-rate=500,900", "--flush-cache")
    assert "500.00" in capsys.readouterr().out
    report = json.loads((tmp_path / "report.json").read_text())
    assert [point["request_rate"] for point in report["points"]] == [500]


def test_a_turn_has_the_answers_before_it(url: str, tmp_path: Path) -> None:
    options = ("--dataset-name", "multi-turn", "--multi-turn-num-users", "2", "--multi-turn-turns", "3")
    lengths = ("--multi-turn-system-len", "5", "--multi-turn-text-len", "4", "--multi-turn-output-len", "3")
    for backend in ("gapless", "vllm"):
        httpx.post(f"{url}/log")
        _, report = bench_serve(
            url, tmp_path, *options, *lengths, "--multi-turn-delay", "0", "--backend", backend
        )
        prompts: list[Any] = [
            request["body"].get("input_ids") or request["body"]["prompt"]
            for request in requests_of(url, report)
        ]
        assert report["completed"] == 6
        assert sorted(len(prompt) for prompt in prompts) == [9, 9, 16, 16, 23, 23]
        for prompt in prompts:
            if len(prompt) > 9:
                before = prompt[:-4]
                assert before[:-3] in prompts
                assert before[-3:] == list(b"bcd")
        assert report["runs"][0]["details"]["input_lens"].count(23) == 2


def test_a_turn_after_one_that_failed_is_not_sent(tmp_path: Path) -> None:
    with scripted_server([{}, {"status": 503}]) as failing:
        options = ("--dataset-name", "multi-turn", "--multi-turn-num-users", "1", "--multi-turn-turns", "3")
        code, report = bench_serve(failing, tmp_path, *options, "--multi-turn-delay", "0")
    assert (code, report["failed"], report["unsent"]) == (1, 1, 2)


def test_messages_go_to_the_chat_route(url: str, tmp_path: Path) -> None:
    """The small request and the warm-up, too: a server may have no other."""
    lines = tmp_path / "lines.jsonl"
    messages = [{"role": "user", "content": "hello"}]
    lines.write_text(json.dumps({"messages": messages, "output_len": 2}) + "\n")
    options = ("--dataset-name", "custom", "--dataset-path", str(lines), "--warmup-requests", "1")
    _, report = bench_serve(url, tmp_path, *options)
    log = httpx.get(f"{url}/log").json()
    assert [request["path"] for request in log] == ["/v1/chat/completions"] * 3
    assert log[-1]["body"]["messages"] == messages and report["completed"] == 1


@pytest.mark.parametrize("streaming", [(), ("--incremental-streaming-output",)])
def test_our_own_server(serve: Any, tmp_path: Path, streaming: tuple[str, ...]) -> None:
    """Exact counts; a second run of the same seed is warm, which is said, unless the cache is flushed."""
    server = serve("--model-path", "toy", "--page-size", "1", *streaming)
    options = (
        "--num-prompts",
        "12",
        "--random-input-len",
        "64",
        "--random-output-len",
        "9",
        "--request-rate",
        "200",
    )
    _, first = bench_serve(server.url, tmp_path, *options, "--warmup-requests", "2")
    assert (first["completed"], first["failed"]) == (12, 0)
    assert first["total_output_tokens"] == first["asked_output_tokens"] == first["chunk_output_tokens"]
    assert first["total_input_tokens"] == first["asked_input_tokens"]
    assert first["cached_tokens"] <= first["explained_cached_tokens"]
    assert first["runs"][0]["samples"] and first["server"]["model_path"] == "toy"
    _, again = bench_serve(server.url, tmp_path, *options)
    assert again["cached_tokens"] > again["explained_cached_tokens"]
    assert any("it was warm" in warning for warning in again["warnings"])
    _, flushed = bench_serve(server.url, tmp_path, *options, "--flush-cache")
    assert flushed["cached_tokens"] <= flushed["explained_cached_tokens"]
    assert not any("warm" in warning for warning in flushed["warnings"])
    texts = [figures["runs"][0]["details"]["output_lens"] for figures in (first, again, flushed)]
    assert texts[0] == texts[1] == texts[2]
