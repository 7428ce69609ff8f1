"""`gapless bench offline --one-batch`: its sums, its report and what it refuses, on the toy model. No timing."""

import json

import pytest

from gapless.bench.one_batch import figures, medians
from gapless.runtime.cli import main

FIGURES = {
    "prefill_latency",
    "prefill_throughput",
    "median_decode_latency",
    "p99_decode_latency",
    "median_decode_throughput",
    "total_latency",
    "overall_throughput",
}
CELL = {"batch_size", "input_len", "output_len"}


def test_the_prefill_ends_with_the_last_first_token_and_only_whole_batches_are_decode_steps():
    both, one, other = frozenset({0, 1}), frozenset({0}), frozenset({1})
    ends = [(11.0, one), (12.0, both), (12.5, both), (13.5, both), (13.75, other)]
    got = figures(ends, started=10.0, batch=2, input_len=6, output_len=4)
    assert got["prefill_latency"] == 2.0 and got["prefill_throughput"] == 6.0
    assert got["median_decode_latency"] == 0.75 and got["median_decode_throughput"] == 2 / 0.75
    assert got["p99_decode_latency"] == pytest.approx(0.995)
    assert got["total_latency"] == 3.75 and got["overall_throughput"] == 20 / 3.75


def test_an_answer_of_one_token_has_no_decode_step():
    got = figures([(1.5, frozenset({3}))], started=1.0, batch=1, input_len=8, output_len=1)
    assert got["prefill_latency"] == got["total_latency"] == 0.5
    none = ("median_decode_latency", "p99_decode_latency", "median_decode_throughput")
    assert [got[key] for key in none] == [None, None, None]
    assert medians([[got], [got]]) == [got]


def test_repeated_runs_give_medians():
    runs = [[{"batch_size": 2, "total_latency": seconds}] for seconds in (1.0, 5.0, 2.0, 4.0)]
    assert medians(runs) == [{"batch_size": 2, "total_latency": 3.0}]


@pytest.mark.parametrize("options", [["--one-batch", "--batch-size", "1", "3"], ["--batch-size", "1", "3"]])
@pytest.mark.parametrize("device", ["cpu", "sim"])
def test_the_report_has_a_result_for_each_size(options, device, tmp_path, capsys):
    path = tmp_path / "report.json"
    lengths = ["--input-len", "5", "40", "--output-len", "6", "--chunked-prefill-size=16", "--repeat=2"]
    engine = ["--model-path=toy", f"--device={device}", "--max-total-tokens=4096"]
    assert main(["bench", "offline", *options, *lengths, *engine, f"--json={path}"]) == 0
    report = json.loads(path.read_text())
    assert (report["benchmark"], report["model"], report["seed"]) == ("one-batch", "toy", 1)
    assert report["device"] and report["options"]["input_len"] == [5, 40]
    cells = [
        tuple(result[key] for key in ("batch_size", "input_len", "output_len"))
        for result in report["results"]
    ]
    assert cells == [(batch, length, 6) for batch in (1, 3) for length in (5, 40)]
    assert [len(run["results"]) for run in report["runs"]] == [4, 4]
    for result in report["results"]:
        assert set(result) == CELL | FIGURES
        assert 0 < result["prefill_latency"] < result["total_latency"]
        assert 0 < result["median_decode_latency"] <= result["p99_decode_latency"]
    assert len(capsys.readouterr().out.splitlines()) == 3 + 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--batch-size", "0"], "--batch-size: 0: must be at least 1"),
        (["--batch-size", "300"], "--batch-size 300: more than --max-running-requests 256"),
        (["--one-batch", "--num-prompts=4"], "--num-prompts: not with --one-batch"),
        (["--output-len=2", "--random-input-len=4"], "--random-input-len: not with --one-batch"),
    ],
)
def test_a_wrong_option_is_named(options, message, capsys):
    with pytest.raises(SystemExit) as exit:
        main(["bench", "offline", "--model-path=toy", *options])
    assert exit.value.code == 2 and message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["--max-total-tokens=64"],
            "--batch-size 4: 128 tokens of KV, but the pool has 64 (--max-total-tokens)",
        ),
        (["--context-length=28"], "--input-len 20 and --output-len 10: the context has 28"),
    ],
)
def test_a_batch_that_cannot_run_at_once_is_an_error(options, message, capsys):
    sizes = ["--batch-size=4", "--input-len=20", "--output-len=10"]
    assert main(["bench", "offline", "--model-path=toy", *sizes, *options]) == 2
    assert message in capsys.readouterr().err
