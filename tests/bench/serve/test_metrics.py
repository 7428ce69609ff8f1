"""Every figure of a run, on records whose times are known."""

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gapless.bench.serve.caveats import caveats
from gapless.bench.serve.goodput import Goodput, parse_goodput
from gapless.bench.serve.metrics import DEFINITIONS, STATISTICS, bucket, details, summarize, times
from gapless.bench.serve.record import Chunk, Record
from gapless.runtime.core.errors import ConfigError

LATENCIES = ("ttft", "tpot", "itl", "chunk_gap", "e2e_latency", "send_lag")


def record(*chunks: tuple[float, int], sent: float = 0.0, **changes: Any) -> Record:
    """A request of 10 tokens that gets what it asked for: chunks of (seconds, tokens)."""
    tokens = sum(count for _, count in chunks)
    fields = {
        "index": 0,
        "prompt_len": 10,
        "output_len": tokens,
        "due": sent,
        "sent": sent,
        "ended": chunks[-1][0] if chunks else sent,
        "completion_tokens": tokens,
        "retokenized": tokens,
        "finish_reason": "length",
    }
    return Record(chunks=[Chunk(at, count) for at, count in chunks], **fields | changes)


def figures(summary: dict[str, Any], name: str) -> list[float]:
    return [summary[f"{statistic}_{name}_ms"] for statistic in STATISTICS]


def test_the_wait_for_the_first_token_is_no_gap_between_tokens() -> None:
    """Case 107: times 1.0, 1.1, 1.2."""
    run = summarize([record((1.0, 1), (1.1, 1), (1.2, 1))], 2.0)
    assert figures(run, "ttft") == [1000, 1000, 0, 1000, 1000, 1000, 1000, 1000]
    for name in ("itl", "chunk_gap", "tpot"):
        assert figures(run, name) == pytest.approx([100, 100, 0, 100, 100, 100, 100, 100])
    assert run["mean_e2e_latency_ms"] == 1200


def test_tpot_is_of_the_tokens_after_the_first_and_one_token_has_none() -> None:
    """Case 108. n is the server's count, not the number of chunks."""
    two, one, none = record((1.0, 3), (2.0, 2)), record((5.0, 1)), record(ended=7.0)
    assert times(two).tpot == 0.25
    assert times(one).tpot is times(none).tpot is times(none).ttft is None
    assert times(none).e2e == 7.0
    run = summarize([two, one, none], 10.0)
    assert figures(run, "tpot") == [250, 250, 0, 250, 250, 250, 250, 250]
    assert run["mean_ttft_ms"] == 3000
    assert (run["completed"], run["single_token"]) == (3, 2)


def test_the_definitions_name_every_latency() -> None:
    for name in ("TTFT", "TPOT", "ITL", "E2E", "chunk gap", "send lag", "concurrency", "goodput", "(n - 1)"):
        assert name in DEFINITIONS


def test_a_chunks_gap_is_shared_among_its_tokens() -> None:
    """Case 109: chunks of 3, 1 and 4 tokens. The first three came together; they give no gap."""
    answer = record((1.0, 3), (1.5, 1), (3.5, 4))
    assert times(answer).itls.tolist() == [0.5, 0.5, 0.5, 0.5, 0.5]
    assert times(answer).gaps.tolist() == [0.5, 2.0]
    run = summarize([answer], 4.0)
    assert (run["mean_itl_ms"], run["max_itl_ms"]) == (500, 500)
    assert (run["mean_chunk_gap_ms"], run["max_chunk_gap_ms"]) == (1250, 2000)
    assert run["mean_tpot_ms"] == pytest.approx(2500 / 7)
    assert (run["total_output_tokens"], run["chunk_output_tokens"]) == (8, 8)


def test_percentiles_are_numpys() -> None:
    ttfts = [0.1, 0.2, 0.4, 0.8, 1.6]
    run = summarize([record((at, 1)) for at in ttfts], 2.0)
    ms = 1000 * np.array(ttfts)
    for percent in (90, 95, 99):
        assert run[f"p{percent}_ttft_ms"] == pytest.approx(np.percentile(ms, percent))
    assert run["median_ttft_ms"] == 400
    assert run["std_ttft_ms"] == pytest.approx(ms.std())
    assert (run["min_ttft_ms"], run["max_ttft_ms"]) == (100, 1600)


def test_rates_are_of_the_completed_requests_over_the_duration() -> None:
    records = [
        record((1.0, 2), (2.0, 2), prompt_tokens=12, retokenized=3),
        record((2.0, 1), (5.0, 3), sent=1.0),
        record((1.0, 100), error="lost"),
        record((1.0, 7), (3.0, 7), cut=True),
    ]
    run = summarize(records, 4.0)
    assert (run["total_input_tokens"], run["asked_input_tokens"]) == (22, 20)
    assert (run["total_output_tokens"], run["total_output_tokens_retokenized"]) == (8, 7)
    assert run["cut_output_tokens"] == 14
    assert run["request_throughput"] == 0.5
    assert (run["input_throughput"], run["output_throughput"], run["total_throughput"]) == (5.5, 2, 7.5)
    assert run["output_throughput_retokenized"] == 1.75
    assert run["concurrency"] == (2 + 4) / 4


def test_a_request_is_in_one_bucket_and_only_completed_ones_have_latencies() -> None:
    """Cases 116 and 118."""
    fast = record((0.1, 1), (0.2, 1))
    records = [fast, record((9.0, 1), error="a"), record((9.0, 1), cut=True), record(error="b", cut=True)]
    assert [bucket(each) for each in records] == ["completed", "failed", "cut", "cut"]
    run, alone = summarize(records, 1.0), summarize([fast], 1.0)
    assert (run["completed"], run["failed"], run["cut"]) == (1, 1, 2)
    for name in LATENCIES[:-1]:
        assert figures(run, name) == figures(alone, name)


def test_without_a_completed_request_there_are_no_latencies() -> None:
    for records in ([], [record(error="refused")], [record((1.0, 1), cut=True)]):
        run = summarize(records, 1.0, Goodput(ttft=1))
        for name in LATENCIES[:-1]:
            assert figures(run, name) == [None] * len(STATISTICS)
        assert run["goodput"] == run["request_throughput"] == run["concurrency"] == 0
        json.dumps(run, allow_nan=False)


def test_errors_are_counted_and_few() -> None:
    failed = [record(error=f"error {min(number, 12)}") for number in range(20)] + [record(error="x" * 999)]
    counts = summarize(failed, 1.0)["error_counts"]
    assert counts["error 12"] == 8
    assert (len(counts), counts["others"], sum(counts.values())) == (11, 4, 21)
    assert max(map(len, counts)) <= 200


def test_early_stops_and_what_the_server_says() -> None:
    """Case 112."""
    records = [
        record((1.0, 2), output_len=8, finish_reason="stop", cached_tokens=5),
        record((1.0, 8), completion_tokens=None, cached_tokens=None),
        record((1.0, 4), prompt_tokens=40, cached_tokens=20, finish_reason=""),
    ]
    run = summarize(records, 1.0)
    assert (run["early_stops"], run["asked_output_tokens"], run["total_output_tokens"]) == (1, 20, 14)
    assert run["finish_reasons"] == {"stop": 1, "length": 1, "unknown": 1}
    assert (run["cached_tokens"], run["cache_hit_rate"]) == (25, 0.5)
    assert (run["without_usage"], run["single_chunk"]) == (1, 3)
    silent = summarize([record((1.0, 1), retokenized=0)], 1.0)
    assert silent["cached_tokens"] is silent["cache_hit_rate"] is None
    assert silent["total_output_tokens_retokenized"] is silent["output_throughput_retokenized"] is None


def test_goodput_is_of_requests_within_all_limits() -> None:
    records = [
        record((0.5, 1), (1.0, 2)),  # TTFT 500, TPOT 250, E2E 1000: just within
        record((0.6, 1), (1.0, 2)),
        record((0.1, 1), (1.0, 1)),
        record((0.4, 1), (1.1, 4)),
        record((0.4, 1)),  # no TPOT
        record(),  # no first token
        record((0.1, 1), error="lost"),
    ]
    run = summarize(records, 4.0, Goodput(ttft=500, tpot=250, e2e=1000))
    assert (run["goodput"], run["goodput_share"]) == (2 / 4, 2 / 7)
    assert run["goodput_limits"] == {"ttft": 500, "tpot": 250, "e2e": 1000}
    assert summarize(records, 4.0)["goodput"] is None
    assert summarize(records, 4.0, Goodput(tpot=100))["goodput"] == 2 / 4


def test_a_cut_request_counts_in_the_share_where_it_had_missed_a_limit() -> None:
    limits = Goodput(ttft=500, e2e=1000)
    open_ones = [record(ended=0.4, cut=True), record((0.2, 1), ended=0.9, cut=True)]
    missed = [
        record(ended=0.6, cut=True),
        record((0.7, 1), ended=0.8, cut=True),
        record((0.1, 1), ended=2.0, cut=True),
    ]
    good = record((0.1, 1), (0.2, 1))
    assert summarize([good, *open_ones, *missed], 1.0, limits)["goodput_share"] == 1 / 4
    assert summarize(open_ones, 1.0, limits)["goodput_share"] is None


@pytest.mark.parametrize(
    ("pairs", "limits"),
    [
        (["ttft:500", "tpot:50", "e2el:2000"], Goodput(500, 50, 2000)),
        (["e2e:1.5"], Goodput(e2e=1.5)),
    ],
)
def test_limits_are_read(pairs: list[str], limits: Goodput) -> None:
    assert parse_goodput(pairs) == limits


@pytest.mark.parametrize(
    ("pairs", "message"),
    [
        (["ttft"], "--goodput ttft: not NAME:MILLISECONDS with one of ttft, tpot, e2e, e2el"),
        (["itl:5"], "--goodput itl:5: not NAME"),
        (["ttft:fast"], "'fast' is not a number of milliseconds above 0"),
        (["ttft:0"], "'0' is not"),
        (["ttft:nan"], "'nan' is not"),
        (["ttft:inf"], "'inf' is not"),
        (["e2e:1", "e2el:2"], "e2e has a limit already"),
        ([], "no limit is given"),
    ],
)
def test_wrong_limits_are_named(pairs: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_goodput(pairs)
    assert message in caught.value.message


def test_details_have_an_entry_for_each_request() -> None:
    records = [
        record((1.0, 2), (2.0, 2), prompt_tokens=11, text="a"),
        record(error="lost"),
        record((3.0, 1), cut=True),
    ]
    assert details(records) == {
        "input_lens": [11, 10, 10],
        "output_lens": [4, 0, 1],
        "start_times": [0.0, 0.0, 0.0],
        "ttfts": [1.0, 0.0, 3.0],
        "e2e_latencies": [2.0, 0.0, 3.0],
        "itls": [[0.5, 0.5], [], []],
        "generated_texts": ["a", "", ""],
        "errors": ["", "lost", "cut: the run's time was up"],
    }


requests = st.builds(
    lambda sent, gaps, cut, error: record(
        *[(sent + float(sum(gaps[: k + 1])), k % 3 + 1) for k in range(len(gaps))],
        sent=sent, cut=cut, error=error,
    ),
    st.floats(0, 10),
    st.lists(st.floats(0, 1), max_size=6),
    st.booleans(),
    st.sampled_from(["", "lost"]),
)  # fmt: skip


@given(st.lists(requests, max_size=12))
def test_the_figures_agree_with_each_other(records: list[Record]) -> None:
    run = summarize(records, 5.0, Goodput(ttft=300, e2e=2000))
    assert run["completed"] + run["failed"] + run["cut"] == len(records)
    assert 0 <= run["goodput"] <= run["request_throughput"]
    for name in LATENCIES:
        if run[f"mean_{name}_ms"] is not None:
            _, median, _, low, p90, p95, p99, high = figures(run, name)
            assert low <= median <= p90 <= p95 <= p99 <= high
    for each in records:
        t = times(each)
        assert t.itls.sum() == pytest.approx(t.gaps.sum())
        assert len(t.itls) == sum(chunk.tokens for chunk in each.chunks[1:])


# --- what casts doubt on a run


def plain(count: int = 40, **changes: Any) -> list[Record]:
    return [record((1.0, 1), (1.1, 1), **{"cached_tokens": 0} | changes) for _ in range(count)]


def found(records: list[Record], **facts: Any) -> str:
    return "\n".join(caveats(summarize(records, 1.0), **facts))


def test_nothing_is_said_of_a_run_without_fault() -> None:
    assert found(plain(cached_tokens=4)) == ""


def test_failures_are_said_with_the_commonest_reason() -> None:
    failed = [record(error="busy"), record(error="busy"), record(error="lost")]
    assert found(plain() + failed) == "failed requests: 3 of 43; 2 of them: busy"
    assert "no request completed: there are no latencies" in found(failed)
    apart = [record(error=f"lost {number}") for number in range(20)]
    assert "22 of 62; 2 of them: busy" in found(plain() + failed[:2] + apart)


def test_early_stops_are_said() -> None:
    """Case 112."""
    records = [*plain(), record((1.0, 1), output_len=5)]
    said = "output tokens: 81 instead of 85; requests that stopped early: 1 although EOS was to be ignored"
    assert found(records) == said
    assert "although" not in found(records, ignore_eos=False)


def test_a_warm_cache_is_said_unless_the_load_explains_the_hits() -> None:
    """Case 113."""
    warm = plain(cached_tokens=9, prompt_tokens=10)
    assert "prompt tokens from the cache: 360 (90.0%) though the load itself explains 0" in found(warm)
    assert found(warm, explained_tokens=200) == ""
    assert found(warm, explained_tokens=199) != ""
    assert found(warm, chat=True) == ""
    assert "whether it was warm is not known" in found(plain(cached_tokens=None))
    assert found(plain(cached_tokens=None), flushed=True) == ""


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        ({"client_cores": 0.95}, "the client used 95% of a core"),
        ({"loop_lag_ms": 12}, "event loop ran 12 ms late"),
    ],
)
def test_a_client_that_is_the_bottleneck_is_said(facts: dict[str, float], message: str) -> None:
    assert message in found(plain(), **facts)


def test_requests_that_are_sent_late_are_said() -> None:
    assert "sent late (p99 20 ms)" in found(plain(due=-0.02))


@pytest.mark.parametrize(
    ("records", "message"),
    [
        (plain(retokenized=1), "output tokens: 80 by the server's count, 40 by the client's"),
        (plain(completion_tokens=None), "answers without usage: 40"),
        (plain(completion_tokens=3, output_len=3, retokenized=3), "output tokens known by chunk: 80 of 120"),
        ([*plain(), record((1.0, 2))], "answers in one chunk: 1"),
        (plain(5), "p99 of 5 requests"),
        ([*plain(), record((1.0, 50), cut=True)], "cut requests: 1; their 50 output tokens are in no rate"),
    ],
)  # fmt: skip
def test_doubtful_counts_are_said(records: list[Record], message: str) -> None:
    assert found(records).startswith(message)
