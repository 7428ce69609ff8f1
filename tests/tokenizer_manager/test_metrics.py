"""GET /metrics: the format, and that the numbers are those of the requests."""

from __future__ import annotations

import re
from typing import Any

import pytest

from gapless.runtime.core.messages import Finish, Finished, Heartbeat, Submit, TextOutput, column
from gapless.tokenizer_manager.metrics import Histogram, Metrics

_SAMPLE = re.compile(r'^(sglang:\w+)\{model_name="((?:[^"\\]|\\.)*)"(?:,le="([^"]+)")?\} (\S+)$')
SGLANG_NAMES = {
    "num_running_reqs", "num_queue_reqs", "token_usage", "cache_hit_rate", "gen_throughput", "prompt_tokens_total",
    "generation_tokens_total", "cached_tokens_total", "time_to_first_token_seconds", "inter_token_latency_seconds",
    "e2e_request_latency_seconds", "queue_time_seconds", "num_retracted_reqs",
}  # fmt: skip


def parse(text: str) -> dict[str, float]:
    """Value by name, with the bucket's bound in brackets; checks each line, and that names are announced once."""
    assert text.endswith("\n")
    values: dict[str, float] = {}
    kinds: dict[str, str] = {}
    for line in text.splitlines():
        if line.startswith("# TYPE "):
            _, _, name, kind = line.split()
            assert name not in kinds
            kinds[name] = kind
        elif not line.startswith("# HELP "):
            match = _SAMPLE.match(line)
            assert match, line
            name, _, bound, value = match.groups()
            family = name if name in kinds else re.sub("_(bucket|sum|count)$", "", name)
            assert kinds[family] == ("histogram" if family != name else kinds[name])
            values[name.removeprefix("sglang:") + (f"[{bound}]" if bound else "")] = float(value)
    return values


def test_the_names_are_sglangs() -> None:
    values = parse(Metrics().text("m", Heartbeat(0, 0, 0, 0, 0, 0), 0))
    names = {re.sub(r"_(bucket\[.*|sum|count)$", "", name) for name in values}
    assert names >= SGLANG_NAMES


def test_a_name_of_a_model_is_escaped() -> None:
    text = Metrics().text('a"b\\c\nd', Heartbeat(0, 0, 0, 0, 0, 0), 0)
    parse(text)
    assert r'model_name="a\"b\\c\nd"' in text


def test_a_histogram_counts_what_is_at_or_below_each_bound() -> None:
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 9.0):
        histogram.observe(value)
    histogram.observe(2.0, 3)
    assert list(histogram.lines("h", 'a="b"')) == [
        'h_bucket{a="b",le="1"} 2', 'h_bucket{a="b",le="2"} 6', 'h_bucket{a="b",le="+Inf"} 7',
        'h_sum{a="b"} 18', 'h_count{a="b"} 7',
    ]  # fmt: skip


def test_rates_are_of_the_last_seconds() -> None:
    metrics = Metrics()
    assert metrics.rates() == (0.0, 0.0)
    for second in range(30):
        metrics.beat(float(second))
        if second >= 20:
            metrics.stepped(7, 0.0, 0)
            metrics.ended(Finish.LENGTH, 1.0, 10, 4)
    throughput, share = metrics.rates()
    assert throughput == pytest.approx(9 * 7 / 10)
    assert share == pytest.approx(0.4)
    assert len(metrics._moments) == 11


def test_numbers_of_requests(run: Any, on_a_socket: Any) -> None:
    """Two requests: one of three tokens, the last two in one message; one that is aborted."""

    async def test() -> None:
        async with on_a_socket() as service:
            task, submit = await service.start(text="abc")
            service.engine.gain(submit.uid, "x", [1])
            service.engine.gain(submit.uid, "yz", [2, 3], Finish.LENGTH)
            assert (await task).status_code == 200
            task, submit = await service.start(text="abc")
            service.engine.gain(submit.uid, finish=Finish.ABORT)
            await task
            service.front.handle(Heartbeat(0.0, 0.0, 3, 4, 125, 9))
            response = await service.client.get("/metrics")
            assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
            values = parse(response.text)
            assert values["num_requests_total"] == 2
            assert values["num_aborted_requests_total"] == 1
            assert values["generation_tokens_total"] == 3
            assert values["prompt_tokens_total"] == 6
            assert values["cached_tokens_total"] == 2
            assert values["time_to_first_token_seconds_count"] == 1
            assert values["inter_token_latency_seconds_count"] == 2
            assert values["e2e_request_latency_seconds_count"] == 2
            assert values["queue_time_seconds_count"] == 2
            assert (values["num_running_reqs"], values["num_queue_reqs"]) == (3, 4)
            assert values["token_usage"] == 0.25

    run(test())


def test_every_token_but_a_requests_first_has_a_gap(run: Any, on_a_socket: Any) -> None:
    """Whether all requests of a step gained one, as nearly always, or some sat it out, or gained two."""

    async def test() -> None:
        async with on_a_socket() as service:
            service.stream(text=["a", "b", "c"])
            uids = [(await service.engine.take(Submit)).uid for _ in range(3)]
            registry = service.front.registry

            def step(*counts: int) -> None:
                rows = [(uid, count) for uid, count in zip(uids, counts, strict=True) if count >= 0]
                registry.apply(
                    TextOutput(
                        column([uid for uid, _ in rows], "<i8"), [""] * len(rows),
                        column([count for _, count in rows], "<i4"), column([5] * sum(c for _, c in rows), "<i4"),
                        [], [],
                    )
                )  # fmt: skip

            for counts in ((1, 1, 1), (1, 1, 1), (1, -1, 1), (1, 1, 2), (1, 0, 1), (1, 1, 1)):
                step(*counts)
            registry.apply(
                TextOutput(
                    b"", [], b"", b"", [Finished(u, Finish.LENGTH, None, "", "", 1, 1, 0) for u in uids], []
                )
            )
            values = parse((await service.client.get("/metrics")).text)
            tokens = values["generation_tokens_total"]
            assert tokens == 3 + 3 + 2 + 4 + 2 + 3
            assert values["time_to_first_token_seconds_count"] == 3
            assert values["inter_token_latency_seconds_count"] == tokens - 3

    run(test())


def test_head_works_and_so_does_a_server_that_loads(run: Any, in_process: Any) -> None:
    """A benchmark client asks by HEAD whether there are metrics."""

    async def test() -> None:
        async with in_process(loaded=False) as service:
            response = await service.client.head("/metrics")
            assert (response.status_code, response.content) == (200, b"")
            assert parse((await service.client.get("/metrics")).text)["token_usage"] == 0

    run(test())
