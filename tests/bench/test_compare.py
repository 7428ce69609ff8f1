"""`gapless bench compare`: false alarms and misses on reports drawn from known distributions; warnings; bad input."""

import copy
import json
import math

import numpy as np
import pytest

from gapless.bench.compare import compare
from gapless.bench.report import envelope
from gapless.bench.significance import Ratio, between_runs, bootstrap, holm, t_quantile, t_tail
from gapless.runtime.cli import main

PAIRS = 200
ENVELOPE = envelope("serve", {"page_size": 16, "port": 1}, 1, model="toy", device="cpu")


def serve(**changes):
    """A report with one run's figures."""
    figures = {
        "completed": 100,
        "failed": 0,
        "duration": 10.0,
        "request_throughput": 10.0,
        "cache_hit_rate": 0.1,
    }
    return ENVELOPE | figures | changes


def summary(random, factor=1.0, noise=0.03):
    """One run's: its figures share the run's mood and have some of their own."""
    mood = random.normal(0, noise)

    def draw(mean, own=noise / 3):
        return mean * math.exp(mood + random.normal(0, own))

    return {
        "output_throughput": 1000 * math.exp(-mood) / factor,
        "median_ttft_ms": draw(50 * factor),
        "p99_ttft_ms": draw(150 * factor, noise),
        "median_tpot_ms": draw(8 * factor),
        "median_e2e_latency_ms": draw(300 * factor),
        "mean_itl_ms": draw(8 * factor),
    }


def repeated(random, runs, factor=1.0):
    return serve(runs=[summary(random, factor) for _ in range(runs)])


def single(random, factor=1.0, count=300):
    """One run with its requests' own values, in which neighbours are alike."""
    load = np.zeros(count)
    for index in range(1, count):
        load[index] = 0.6 * load[index - 1] + random.normal(0, 0.15)
    ttfts = 0.05 * factor * np.exp(load + random.normal(0, 0.2, count))
    itls = 0.008 * factor * np.exp(load[:, None] / 3 + random.normal(0, 0.2, (count, 4)))
    starts = np.cumsum(random.exponential(0.02 * factor, count))
    e2e = ttfts + itls.sum(axis=1)
    ms = {
        "ttft": 1000 * ttfts,
        "itl": 1000 * itls,
        "tpot": 1000 * itls.mean(axis=1),
        "e2e_latency": 1000 * e2e,
    }
    figures = {f"median_{name}_ms": float(np.median(of)) for name, of in ms.items()}
    figures["p99_ttft_ms"] = float(np.percentile(ms["ttft"], 99))
    figures["output_throughput"] = 5 * count / float((starts + e2e).max())
    details = {
        "input_lens": [32] * count,
        "output_lens": [5] * count,
        "ttfts": ttfts.tolist(),
        "itls": itls.tolist(),
        "start_times": starts.tolist(),
        "errors": [""] * count,
    }
    return serve(runs=[{**figures, "details": details}], **figures)


def share_that_differs(make, factor, pairs=PAIRS, **options):
    random = np.random.default_rng(5)
    found = 0
    for _ in range(pairs):
        comparison = compare([make(random)], [make(random, factor=factor)], random, **options)
        found += bool(comparison.differences)
    return found / pairs


@pytest.mark.parametrize("runs", [2, 3, 5, 10])
def test_repeated_runs_of_the_same_thing_rarely_differ(runs):
    """Even with no tolerance at all."""

    def make(random, factor=1.0):
        return repeated(random, runs, factor)

    assert share_that_differs(make, 1.0, tolerance=0) <= 0.05


@pytest.mark.parametrize("factor", [1.2, 1 / 1.2])
def test_a_true_difference_of_20_percent_is_found_in_five_runs(factor):
    def make(random, factor=1.0):
        return repeated(random, 5, factor)

    assert share_that_differs(make, factor) >= 0.95


def test_single_runs_of_the_same_thing_rarely_differ():
    assert share_that_differs(single, 1.0) <= 0.05


@pytest.mark.parametrize("factor", [1.2, 1 / 1.2])
def test_a_true_difference_of_20_percent_is_found_in_single_runs(factor):
    assert share_that_differs(single, factor, pairs=60) >= 0.95


def test_several_files_a_side_are_runs():
    random = np.random.default_rng(1)
    a, b = ([serve(**summary(random, factor)) for _ in range(4)] for factor in (1.0, 1.5))
    comparison = compare(a, b, random)
    assert {figure.name for figure in comparison.differences} == {
        "output_throughput",
        "median_ttft_ms",
        "p99_ttft_ms",
        "median_tpot_ms",
        "median_e2e_latency_ms",
    }
    assert all(figure.is_worse for figure in comparison.differences)
    assert not any(figure.one_run for figure in comparison.figures)


def test_the_direction_says_what_is_better():
    runs = [
        {"output_throughput": rate, "median_ttft_ms": ms} for rate, ms in ((100, 20), (101, 20.2), (99, 19.8))
    ]
    swapped = [{name: 2 * value for name, value in run.items()} for run in runs]
    comparison = compare([serve(runs=runs)], [serve(runs=swapped)], np.random.default_rng(1))
    verdicts = {figure.name: figure.verdict for figure in comparison.figures}
    assert verdicts["output_throughput"] == "B is higher by 100.0 %, better"
    assert verdicts["median_ttft_ms"] == "B is higher by 100.0 %, worse"
    assert comparison.verdict == (
        "output_throughput: B is higher by 100.0 %, better; median_ttft_ms: B is higher by 100.0 %, worse"
    )


def test_a_difference_within_the_tolerance_is_none():
    a, b = ([{"output_throughput": rate + noise} for noise in (0, 0.01, 0.02)] for rate in (1000, 1030))
    for tolerance, differs in ((None, True), (2.5, True), (3.5, False)):
        comparison = compare([serve(runs=a)], [serve(runs=b)], np.random.default_rng(1), tolerance)
        assert bool(comparison.differences) == differs


def test_one_run_without_its_requests_tells_nothing():
    a, b = serve(median_ttft_ms=10.0), serve(median_ttft_ms=90.0)
    comparison = compare([a], [b], np.random.default_rng(1))
    assert {figure.verdict for figure in comparison.figures} == {"unknown"}
    assert comparison.verdict.startswith("unknown: one run a side") and not comparison.differences


def test_one_run_with_its_requests_is_marked_and_failed_ones_are_left_out():
    a = single(np.random.default_rng(3))
    b = copy.deepcopy(a)
    details = b["runs"][0]["details"]
    details["errors"][7], details["ttfts"][7], details["itls"][7] = "it was cut off", 0.0, []
    comparison = compare([a], [b], np.random.default_rng(1))
    by_name = {figure.name: figure for figure in comparison.figures}
    for name in (
        "median_ttft_ms",
        "median_itl_ms",
        "median_tpot_ms",
        "median_e2e_latency_ms",
        "output_throughput",
    ):
        assert by_name[name].one_run and by_name[name].ratio.value == 1.0
        assert by_name[name].ratio.low < 1 < by_name[name].ratio.high
    assert by_name["p99_ttft_ms"].ratio is None  # three values are beyond it
    assert comparison.verdict == "no difference"


def test_the_points_of_two_sweeps_are_compared_one_by_one():
    random = np.random.default_rng(4)

    def sweep(*factors):
        runs = [single(random, factor) for factor in factors]
        return ENVELOPE | {
            "points": [
                run["runs"][0] | {"request_rate": rate, "failed": 1} for rate, run in enumerate(runs, 1)
            ]
        }

    comparison = compare([sweep(1.0, 1.0)], [sweep(1.0, 1.5)], random)
    assert {figure.name.partition(" ")[0] for figure in comparison.differences} == {"request_rate=2"}
    by_name = {figure.name: figure for figure in comparison.figures}
    assert (
        by_name["request_rate=2 median_ttft_ms"].is_worse and by_name["request_rate=1 median_ttft_ms"].one_run
    )
    assert "2 requests failed in A: its figures are of the others alone" in comparison.warnings


def test_what_depends_on_the_seed_alone_is_compared_exactly():
    def report(rate):
        result = {"workload": "w", "policy": "lpm", "eviction": "lru", "memory_share": 0.5, "hit_rate": rate}
        return envelope("cache", {}, 1) | {"results": [result | {"oracle_hit_rate": 0.9}]}

    random = np.random.default_rng(1)
    assert compare([report(0.5)], [report(0.5)], random).verdict == "no difference"
    (figure,) = compare([report(0.5)], [report(0.495)], random).differences
    assert figure.name == "workload=w policy=lpm eviction=lru memory_share=0.5 hit_rate"
    assert figure.verdict == "B is lower by 1.0 %, worse"


def test_a_figure_of_0_has_no_ratio():
    a, b = ({"runs": [{"median_ttft_ms": 0.0, "median_tpot_ms": value}] * 2} for value in (0.0, 5.0))
    comparison = compare([serve(**a)], [serve(**b)], np.random.default_rng(1))
    verdicts = {figure.name: figure.verdict for figure in comparison.figures}
    assert (verdicts["median_ttft_ms"], verdicts["median_tpot_ms"]) == ("no difference", "unknown")


@pytest.mark.parametrize(
    ("change", "warning"),
    [
        ({"seed": 2}, "seed differs: 1 in A, 2 in B"),
        ({"model": "demo"}, "model differs: toy in A, demo in B"),
        ({"device": "H100"}, "device differs: cpu in A, H100 in B"),
        ({"machine": {"cpu": "Z80", "cores": 1}}, "machine.cpu differs: {cpu} in A, Z80 in B"),
        ({"versions": {"torch": "0"}}, "versions.torch differs: {torch} in A, 0 in B"),
        ({"options": {"page_size": 1}}, "options.page_size differs: 16 in A, 1 in B"),
        ({"options": {"lag": 3}}, "options.page_size differs: 16 in A, not given in B"),
        ({"dataset_name": "sharegpt"}, "dataset_name differs: random in A, sharegpt in B"),
        (
            {"server": {"disable_radix_cache": True}},
            "server.disable_radix_cache differs: False in A, True in B",
        ),
        ({"cache_hit_rate": 0.2}, "the cache was warmer in B: hit rate 10.0% in A, 20.0% in B"),
        ({"failed": 3}, "3 requests failed in B: its figures are of the others alone"),
        ({"model": None}, "model is not told in B"),
        ({"goodput": 8.0, "median_ttft_ms": 5.0}, "2 figures are in one side alone"),
    ],
)
def test_what_was_not_the_same_is_a_warning(change, warning):
    a = serve(dataset_name="random", server={"disable_radix_cache": False})
    facts = {"cpu": a["machine"]["cpu"], "torch": a["versions"]["torch"]}
    warnings = compare([a], [a | change], np.random.default_rng(1)).warnings
    assert warning.format(**facts) in warnings


def test_the_same_settings_give_no_warning_and_a_port_is_no_setting():
    a, b = serve(options={"port": 1}), serve(options={"port": 2}, started="another day", cache_hit_rate=0.14)
    assert compare([a], [b], np.random.default_rng(1)).warnings == []


def test_the_command_prints_warns_and_writes(tmp_path, capsys):
    random = np.random.default_rng(2)
    paths = {name: tmp_path / f"{name}.json" for name in "abc"}
    paths["a"].write_text(json.dumps(repeated(random, 5)))
    paths["b"].write_text(json.dumps(repeated(random, 5, factor=2) | {"seed": 9}))
    pair = ["bench", "compare", str(paths["a"]), str(paths["b"])]
    assert main([*pair, f"--json={paths['c']}"]) == 0
    printed = capsys.readouterr()
    assert "median_ttft_ms *" in printed.out and "verdict: output_throughput: B is lower by" in printed.out
    assert printed.err == "warning: seed differs: 1 in A, 9 in B\n"
    report = json.loads(paths["c"].read_text())
    assert report["benchmark"] == "compare" and report["compared"] == "serve"
    assert report["warnings"] == ["seed differs: 1 in A, 9 in B"]
    figure = report["figures"][0]
    assert figure["headline"] and figure["differs"] and figure["ratio"]["low"] < 0.5 < figure["ratio"]["high"]
    assert main([*pair, "--fail-on-regression"]) == 1
    assert main(["bench", "compare", *reversed(pair[2:]), "--fail-on-regression"]) == 0
    sides = ["--a", str(paths["a"]), str(paths["a"]), "--b", str(paths["a"])]
    capsys.readouterr()
    assert main(["bench", "compare", *sides]) == 0
    assert capsys.readouterr().out.endswith("verdict: no difference\n")


def test_the_last_line_of_another_benchmarks_file_is_read(tmp_path, capsys):
    line = {"backend": "sglang", "completed": 9, "request_throughput": 2.0, "median_ttft_ms": 5.0}
    path = tmp_path / "bench.jsonl"
    path.write_text("".join(json.dumps(line | {"median_ttft_ms": ms}) + "\n" for ms in (4.0, 7.0)))
    ours = tmp_path / "ours.json"
    ours.write_text(json.dumps(serve(median_ttft_ms=7.0)))
    assert main(["bench", "compare", str(path), str(ours)]) == 0
    printed = capsys.readouterr()
    assert "median_ttft_ms * " in printed.out and " 4 " not in printed.out
    assert "warning: machine is not told in A\n" in printed.err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "b.json: No such file or directory"),
        ("{", "b.json: not JSON: "),
        ("", "b.json: not JSON: "),
        ("[1]", "b.json: not a report: JSON, but no object"),
        ("{}", "b.json: not a report of `gapless bench`"),
        (json.dumps(envelope("radix", {}, 1)), "the reports are of different benchmarks: serve, radix"),
        (json.dumps(envelope("serve", {}, 1)), "the reports have no figure in common"),
    ],
)
def test_what_is_no_report_to_compare_with_is_named(text, message, tmp_path, capsys):
    a, b = tmp_path / "a.json", tmp_path / "b.json"
    a.write_text(json.dumps(serve()))
    if text is not None:
        b.write_text(text)
    assert main(["bench", "compare", str(a), str(b)]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "options", [[], ["a.json"], ["a.json", "b.json", "--a", "c.json"], ["--b", "b.json"]]
)
def test_two_sides_must_be_given(options, capsys):
    assert main(["bench", "compare", *options]) == 2
    assert "give two reports" in capsys.readouterr().err


def test_students_t_is_that_of_the_tables():
    for freedom, quantile in ((1, 12.706), (2, 4.3027), (8, 2.3060), (30, 2.0423), (500, 1.9647)):
        assert t_quantile(freedom) == pytest.approx(quantile, rel=1e-4)
        assert t_tail(quantile, freedom) == pytest.approx(0.05, rel=1e-3)
    assert t_tail(0.0, 5) == 1.0 and t_tail(63.657, 1) == pytest.approx(0.01, rel=1e-3)


def test_a_ratio_of_runs_is_students():
    got = between_runs([1.0, math.e**2], [math.e, math.e**3])
    assert got.value == pytest.approx(math.e)
    half = 4.3027 * math.sqrt(2)
    assert (got.low, got.high) == pytest.approx((math.exp(1 - half), math.exp(1 + half)), rel=1e-3)
    assert between_runs([2.0, 2.0], [2.0]) == Ratio(1.0, 1.0, 1.0, 1.0)


def test_holms_steps_end_at_the_first_that_does_not_stand():
    assert holm([0.04, 0.001, 0.02, 0.03]) == [False, True, False, False]
    assert holm([0.01, 0.02, 0.02]) == [True, True, True]
    assert holm([]) == []


def test_the_bootstrap_draws_whole_blocks():
    blocks = [np.full(4, float(value)) for value in (1, 1, 1, 9, 9, 9)]
    random = np.random.default_rng(1)
    means = bootstrap(blocks, None, random).values
    assert set(np.round((means - 1) / 8 * 6, 9)) <= set(range(7)) and len(set(means)) > 4
    assert set(bootstrap(blocks, 50.0, random).values) == {1.0, 9.0}
    assert bootstrap(blocks, 90.0, random) is None  # 2.4 values are beyond it
    assert bootstrap(blocks[:4], None, random) is None
