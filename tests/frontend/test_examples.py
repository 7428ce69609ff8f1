"""The examples run as they are told to, and do what the plain calls of an engine would do."""

from __future__ import annotations

import importlib
import json
import math
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from jsonschema import validate

import gapless
from gapless import Engine

EXAMPLES = Path(__file__).parents[2] / "examples"
NAMES = sorted(path.stem for path in EXAMPLES.glob("*.py") if path.stem != "model")


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine("toy", chat_template="gemma") as engine:
        yield engine


@pytest.fixture(autouse=True)
def default_backend(engine: Engine) -> None:
    gapless.set_default_backend(engine)


@pytest.fixture
def example(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module that the test names."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return importlib.import_module(request.param)


def of(name: str) -> Any:
    return pytest.mark.parametrize("example", [name], indirect=True)


def written(engine: Engine, prompt: str, **params: Any) -> str:
    text: str = engine.generate(prompt, {"temperature": 0, **params})["text"]
    return text


def run(*arguments: str) -> str:
    command = [sys.executable, *arguments]
    ended = subprocess.run(
        command, capture_output=True, text=True, timeout=100, check=False, cwd=EXAMPLES.parent
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def test_all_examples_run_on_a_server_as_programs_do(serve: Any) -> None:
    url = serve("--chat-template=gemma").url
    for name in NAMES:
        assert run(f"examples/{name}.py", f"--base-url={url}"), name


def test_an_example_loads_its_model() -> None:
    lines = run("examples/classify.py", "--model-path=toy").splitlines()
    assert len(lines) == 4


@of("chat")
def test_chat(example: Any, engine: Engine, capsys: pytest.CaptureFixture[str]) -> None:
    state = example.chat.run(example.QUESTIONS, temperature=0)
    turns = state.messages()
    assert [turn["role"] for turn in turns] == ["system"] + ["user", "assistant"] * 3
    assert tuple(turn["content"] for turn in turns[1::2]) == example.QUESTIONS
    assert state.text().startswith(engine.apply_chat_template(turns[:2]))
    generation = "<start_of_turn>model\n"
    parts = state.text().split(generation)
    for number in range(3):
        prompt = generation.join([*parts[: number + 1], ""])
        assert state[f"answer{number}"] == written(engine, prompt, max_new_tokens=32, stop="\n")
    example.main()
    assert capsys.readouterr().out == f"{state.text()}\n7 turns\n"


@of("classify")
def test_classify(example: Any) -> None:
    items = [{"headline": headline} for headline in example.HEADLINES]
    topics = [state.ret_value for state in example.classify.run_batch(items)]
    assert set(topics) <= set(example.LABELS)
    assert topics == [example.classify.run(**item).ret_value for item in items]


@of("tree_of_thought")
def test_tree_of_thought(example: Any, engine: Engine) -> None:
    state = example.solve.run(example.PROBLEM, temperature=0)
    path = state.ret_value
    assert len(path) == 3
    text = example.PROBLEM
    for level, (score, step) in enumerate(path, start=1):
        text += f"Step {level}:"
        seeds = [
            written(engine, text, max_new_tokens=24, stop="\n", temperature=0.8, sampling_seed=i)
            for i in (1, 2, 3)
        ]
        assert step in seeds
        text += f"{step}\n"
        assert math.isfinite(score)
    assert state["answer"] == written(engine, text + "Answer:", max_new_tokens=8, stop="\n")


@of("tools")
def test_tools(example: Any) -> None:
    state = example.answer.run(example.QUESTION, temperature=0)
    text = state.text().removeprefix(example.EXAMPLE)
    inputs = [line for line in text.splitlines() if line.startswith("Input: ")]
    results = [line for line in text.splitlines() if line.startswith("Observation: ")]
    assert inputs and len(inputs) == len(results)
    for expression, result in zip(inputs, results, strict=True):
        assert example.calculate(expression.removeprefix("Input: ")) == int(
            result.removeprefix("Observation: ")
        )
    assert text.endswith(f"Answer: {state['answer']}") and state.ret_value == int(state["answer"])
    assert example.calculate("12 * 7") == 84


@of("extract")
def test_extract(example: Any) -> None:
    states = example.extract.run_batch([{"text": text} for text in example.TEXTS], temperature=0)
    for state in states:
        validate(state.ret_value, example.SCHEMA)
        assert json.loads(state["record"]) == state.ret_value


@of("tips")
def test_tips(example: Any, engine: Engine) -> None:
    state = example.advise.run("a healthy life", temperature=0)
    start = state.text()[: state.text().index("\n- ")]
    text = start
    for number, tip in enumerate(example.TIPS, start=1):
        prompt = f"{start}\nTip {number} in more words: {tip.removesuffix('.')},"
        detail = written(engine, prompt, max_new_tokens=32, stop="\n")
        assert state["detail"][number - 1] == detail
        text += f"\n- {tip}{detail}"
    text += "\nIn summary,"
    assert state.text() == text + written(engine, text, max_new_tokens=32, stop="\n")


@of("score")
def test_score(example: Any, capsys: pytest.CaptureFixture[str]) -> None:
    *rated, failed = example.rate.run_batch([{"review": review} for review in example.REVIEWS])
    for state in rated:
        assert (state["verdict"] == "good") == (state.ret_value >= 0.5)
    assert "an empty review" in str(failed.error())
    example.main()
    assert [line.split(":")[0] for line in capsys.readouterr().out.splitlines()][-1] == "failed"
