"""`gapless bench cache`: the real scheduler against the oracle on small workloads, and the form of the report."""

import dataclasses
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gapless.bench.cache import RUNNING, cached_tokens, pages_needed
from gapless.bench.workloads import Call, best_possible, few_shot, multi_turn, tree_of_thought
from gapless.runtime.cli import main
from gapless.runtime.core.config import ServerConfig
from gapless.runtime.core.errors import InternalError

SMALL = {
    "multi-turn": lambda seed: multi_turn(seed, users=8, turns=3, text_len=20, answer_len=12),
    "few-shot": lambda seed: few_shot(seed, tasks=4, questions=6, examples_len=96, question_len=16),
    "tree-of-thought": lambda seed: tree_of_thought(seed, problems=2, question_len=20, thought_len=12),
}


def config(pages, **options):
    options = {"max_running_requests": 4, "page_size": 4} | options
    return ServerConfig(
        model_path="toy", device="sim", max_total_tokens=pages * options["page_size"], **options
    )


@st.composite
def chained_calls(draw):
    """Calls of few ids, each of which waits for the one before and may contain any earlier text."""
    ids, calls = st.lists(st.integers(0, 1), min_size=1, max_size=9), []
    for number in range(draw(st.integers(1, 7))):
        source = draw(st.integers(-1, number - 1))
        before = [] if source < 0 else calls[source].text.tolist()
        prompt, answer = np.array(before + draw(ids), np.int32), np.array(draw(ids), np.int32)
        calls.append(Call(prompt, answer, number - 1, 0.0, 0))
    return calls


@settings(max_examples=50)
@given(chained_calls(), st.sampled_from([1, 4]))
def test_calls_that_come_one_by_one_are_cached_as_the_oracle_says(calls, page_size):
    got = cached_tokens(calls, config(400, page_size=page_size))
    assert got == best_possible(calls, page_size).cached_tokens


@settings(max_examples=30)
@given(chained_calls(), st.integers(24, 48))
def test_calls_that_come_together_find_no_more_than_the_oracle(calls, pages):
    calls = [dataclasses.replace(call, after=-1) for call in calls]
    longest = max(len(call.text) for call in calls)
    got = cached_tokens(calls, config(max(pages, longest), page_size=1))
    assert 0 <= got <= best_possible(calls, 1).cached_tokens


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("policy", ["lpm", "fcfs"])
def test_half_of_the_memory_gives_less_than_all_and_all_nearly_the_best(name, policy):
    calls = SMALL[name](1)
    best = best_possible(calls, 4)
    half, full = (
        cached_tokens(calls, config((best.pages + 4) // part, schedule_policy=policy)) for part in (2, 1)
    )
    assert half <= full <= best.cached_tokens
    assert full >= 0.9 * best.cached_tokens


def test_two_runs_are_the_same():
    calls, options = SMALL["multi-turn"](3), config(100, schedule_policy="random", random_seed=1)
    assert cached_tokens(calls, options) == cached_tokens(calls, options)


def test_a_pool_that_does_not_hold_the_longest_request_is_an_error():
    calls = SMALL["few-shot"](1)
    with pytest.raises(InternalError, match="a pool of 16 tokens for a request of"):
        cached_tokens(calls, config(4))


def test_the_report_has_a_result_for_each_cell(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr("gapless.bench.cache.WORKLOADS", SMALL)
    path = tmp_path / "report.json"
    part = ["--workload", "few-shot", "tree-of-thought", "--policy", "fcfs", "lpm", "--eviction", "lru"]
    assert main(["bench", "cache", *part, "--seed=4", f"--json={path}"]) == 0
    report = json.loads(path.read_text())
    keys = ("workload", "policy", "eviction", "memory_share")
    cells = [tuple(result[key] for key in keys) for result in report["results"]]
    assert cells == [
        (name, policy, "lru", share)
        for name in ("few-shot", "tree-of-thought")
        for policy in ("fcfs", "lpm")
        for share in (0.25, 0.5, 1.0)
    ]
    for result in report["results"]:
        assert set(result) == {*keys, "hit_rate", "oracle_hit_rate"}
        assert 0 <= result["hit_rate"] <= result["oracle_hit_rate"] < 1
    best = best_possible(SMALL["few-shot"](4), 16)
    facts = report["workloads"]["few-shot"]
    assert facts["oracle_hit_rate"] == best.hit_rate == report["results"][0]["oracle_hit_rate"]
    assert facts["pages_needed"] == pages_needed(best) == best.pages + RUNNING
    assert report["benchmark"] == "cache" and report["seed"] == 4
    printed = capsys.readouterr().out
    assert "few-shot: 24 requests" in printed and "25%" in printed and "fcfs" in printed


@pytest.mark.parametrize(
    "option", ["--policy=best", "--workload=chat", "--eviction=mru", "--memory-share=0.3"]
)
def test_a_wrong_choice_is_named(option, capsys):
    with pytest.raises(SystemExit) as exit:
        main(["bench", "cache", option])
    assert exit.value.code == 2 and option.partition("=")[0] in capsys.readouterr().err
