"""`gapless bench programs` on the toy model: both ways do the same work, counts are exact. No timing."""

import json
from types import SimpleNamespace

import pytest

from gapless.bench import program_batch, program_models, program_workloads, programs
from gapless.bench.program_models import Tokens
from gapless.runtime.cli import main

SIZES = {
    "questions": 6,
    "shared-len": 120,
    "uncached-questions": 2,
    "trees": 2,
    "branches": 2,
    "depth": 3,
    "problem-len": 30,
    "thought-len": 6,
    "users": 3,
    "turns": 4,
    "system-len": 20,
    "question-len": 4,
    "answer-len": 5,
    "items": 40,
}
OPTIONS = [f"--{name}={value}" for name, value in SIZES.items()]
NAMES = ["few-shot", "tree-of-thought", "multi-turn"]


def measured(tmp_path, *options):
    path = tmp_path / "report.json"
    assert main(["bench", "programs", *OPTIONS, *options, f"--json={path}"]) == 0
    return json.loads(path.read_text())


def check_results(report):
    """What holds of every report with all ways."""
    assert [result["workload"] for result in report["results"]] == NAMES
    for result in report["results"]:
        prompt, computed = result["prompt_tokens"], result["computed_tokens"]
        assert result["same_answers"] == 1
        assert computed["uncached"] == prompt["uncached"] > 0 == result["hit_rate"]["uncached"]
        for way in ("program", "plain"):
            assert result["hit_rate"][way] == pytest.approx(1 - computed[way] / prompt[way])
        assert result["prefill_ratio"] == computed["uncached"] / computed["program"] > 1.5
        seconds = result["duration"]
        assert result["speedup"] == seconds["plain"] / seconds["program"]


def test_all_ways_do_the_same_work_and_the_cache_saves_most_of_it(tmp_path, capsys):
    report = measured(tmp_path, "--model-path=toy")
    assert (report["benchmark"], report["model"]) == ("programs", "toy")
    assert "toy model" in report["device"] and report["options"]["users"] == 3
    check_results(report)
    few_shot, tree, talk = (result["prompt_tokens"] for result in report["results"])
    assert few_shot["plain"] > 4 * 6 * 120  # one call a label
    assert talk["program"] == talk["plain"] == talk["uncached"]
    assert tree["program"] == tree["uncached"] > tree["plain"]  # a fork's commit is a request, too
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("run_batch of 40 items")
    assert [line.split()[:2] for line in lines if line.startswith("multi-turn ")] == [
        ["multi-turn", way] for way in programs.WAYS
    ]


def test_runs_are_repeated_on_new_texts_and_the_table_may_be_markdown(tmp_path, capsys):
    options = ("--model-path=toy", "--workload", "multi-turn", "--repeat=3", "--markdown")
    report = measured(tmp_path, *options)
    runs = [run["results"][0]["prompt_tokens"]["plain"] for run in report["runs"]]
    assert len(set(runs)) > 1
    assert report["results"][0]["prompt_tokens"]["plain"] == sorted(runs)[1]
    assert "batch" not in report
    table = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert len(table) == 2 + 3 and {line.count("|") for line in table} == {9}


def test_servers_are_measured_by_their_own_counters(serve, tmp_path):
    urls = [
        f"--base-url={serve().url}",
        f"--uncached-base-url={serve('--disable-radix-cache').url}",
    ]
    served = measured(tmp_path, *urls, "--workload", *NAMES)
    check_results(served)
    assert served["model"] == "toy" and "toy model" in served["device"]
    here = measured(tmp_path, "--model-path=toy", "--workload", *NAMES)
    for there, result in zip(served["results"], here["results"], strict=True):
        assert there["prompt_tokens"] == result["prompt_tokens"]
        assert there["computed_tokens"]["plain"] == result["computed_tokens"]["plain"]


def test_a_server_alone_is_measured_without_the_third_way(serve, tmp_path):
    report = measured(tmp_path, f"--base-url={serve().url}", "--workload", "multi-turn")
    (result,) = report["results"]
    assert set(result["duration"]) == {"program", "plain"} and "prefill_ratio" not in result


def test_a_server_with_the_wrong_cache_is_refused(serve, capsys):
    urls = (f"--base-url={serve('--disable-radix-cache').url}", "--workload=few-shot")
    assert main(["bench", "programs", *OPTIONS, *urls]) != 0
    assert "--base-url: the server at" in capsys.readouterr().err


def test_some_questions_stand_for_all_of_them():
    parsed = SimpleNamespace(**{name.replace("-", "_"): value for name, value in SIZES.items()})
    model = SimpleNamespace(count=len)
    scales = [programs.workload("few-shot", parsed, 1, model, uncached=some).scale for some in (False, True)]
    assert scales == [1, 3]

    class Counting(SimpleNamespace):
        total = Tokens(100, 40)

        def flush(self):
            self.flushed = True

        def tokens(self):
            return self.total

        def ask(self, _):
            assert self.flushed
            self.total += Tokens(50, 10)
            return ["answer"]

    model = Counting()
    work = program_workloads.Workload("few-shot", model.ask, model.ask, scale=3)
    figures, answers = programs.measure_way(work, "program", model)
    assert answers == ["answer"]
    assert (figures["prompt_tokens"], figures["computed_tokens"], figures["hit_rate"]) == (150, 120, 0.2)


def test_the_ways_take_turns_at_being_the_first(monkeypatch):
    order = []

    def measure_way(work, way, model):
        order.append(way)
        return dict.fromkeys(programs.FIGURES, 1), ["answer"]

    monkeypatch.setattr(programs, "measure_way", measure_way)
    monkeypatch.setattr(programs, "workload", lambda *_, **__: None)
    for turn in range(4):
        programs.measure_workload("multi-turn", dict.fromkeys(programs.WAYS), SimpleNamespace(seed=1), turn)
    assert order[::3] == [*programs.WAYS, programs.WAYS[0]]
    assert [sorted(order[i : i + 3]) for i in (0, 3, 6, 9)] == [sorted(programs.WAYS)] * 4


def test_medians_are_those_of_each_figure():
    runs = [[{"workload": "few-shot", "duration": {"plain": n}, "speedup": -n}] for n in (1, 5, 3)]
    assert programs.medians(runs) == [{"workload": "few-shot", "duration": {"plain": 3}, "speedup": -3}]


def test_items_in_flight_take_no_threads():
    result = program_batch.measure(1000)
    assert result["items"] == 1000 and result["duration"] > 0
    threads = result["threads"]
    assert threads["before"] == threads["most"] == threads["after"] > 1
    assert result["rss_peak"] >= result["rss_before"] > 0


@pytest.mark.parametrize("line", ["sglang:some_total 12", 'sglang:some_total{model_name="a b"} 12'])
def test_counters_are_found_by_name(line):
    assert (
        program_models._counter(f"# HELP x\nsglang:some_total_more 3\n{line}\nother 1\n", "some_total") == 12
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--disable-radix-cache"], "runs with the cache and without it"),
        (["--uncached-base-url=http://127.0.0.1:1"], "needs --base-url"),
        (["--base-url=here"], "'here' is not a URL"),
        (["--users=0"], "must be at least 1"),
        (["--workload=radix"], "invalid choice"),
    ],
)
def test_a_wrong_option_is_named(options, message, capsys):
    with pytest.raises(SystemExit) as exit:
        main(["bench", "programs", *options])
    assert exit.value.code == 2 and message in capsys.readouterr().err
