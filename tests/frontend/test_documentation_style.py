"""Programs in the manner of SGLang's documentation run here with another import."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

import gapless as sgl


@pytest.fixture(scope="module")
def engine() -> Iterator[sgl.Engine]:
    with sgl.Engine(model_path="toy", chat_template="chatml") as engine:
        yield engine


@pytest.fixture(autouse=True)
def use_engine(no_default_backend: None, engine: sgl.Engine) -> None:
    sgl.set_default_backend(engine)


@sgl.function
def few_shot_qa(s, question):  # type: ignore[no-untyped-def]
    s += """The following are questions with answers.
Q: What color is the sky?
A: Blue
"""
    s += "Q: " + question + "\n"
    s += "A:" + sgl.gen("answer", stop="\n", temperature=0, max_tokens=16)


@sgl.function
def multi_turn(s, question_1, question_2):  # type: ignore[no-untyped-def]
    s += sgl.system("You are a helpful assistant.")
    s += sgl.user(question_1)
    s += sgl.assistant(sgl.gen("answer_1", max_tokens=8))
    with s.user():
        s += question_2
    s += sgl.assistant_begin()
    s += sgl.gen("answer_2", max_tokens=8)
    s += sgl.assistant_end()


@sgl.function
def tool_use(s, question):  # type: ignore[no-untyped-def]
    s += "To answer: " + question + ", I need a "
    s += sgl.gen("tool", choices=["calculator", "search engine"]) + ". "
    if s["tool"] == "calculator":
        s += "The expression is " + sgl.gen("expression", max_tokens=4)
    elif s["tool"] == "search engine":
        s += "The keyword is " + sgl.gen("word", max_tokens=4)


@sgl.function
def tips(s):  # type: ignore[no-untyped-def]
    s += "Two tips for staying healthy: 1. Diet. 2. Exercise.\n\n"
    forks = s.fork(2)
    for i, f in enumerate(forks):
        f += f"Expand tip {i + 1}:\n"
        f += sgl.gen("detailed_tip", max_tokens=8, stop="\n\n")
    s += "Tip 1:" + forks[0]["detailed_tip"] + "\n"
    s += "Tip 2:" + forks[1]["detailed_tip"] + "\n"
    s += "In summary" + sgl.gen("summary", max_tokens=8)


@sgl.function
def parallel_sample(s, question, n):  # type: ignore[no-untyped-def]
    s += "Question: " + question + "\n"
    forks = s.fork(n)
    forks += "Reasoning:" + sgl.gen("reasoning", stop="\n", max_tokens=8) + "\n"
    forks += "Tool:" + sgl.gen("tool", choices=["calculator", "browser"]) + "\n"
    forks.join()


@sgl.function
def address(s):  # type: ignore[no-untyped-def]
    s += "Q: What is the address?\nA: "
    with s.var_scope("whole"):
        s += sgl.gen("answer", temperature=0, regex=r"(25[0-5]|2[0-4]\d|[01]?\d\d?)\.0\.0\.1")


@sgl.function
def tips_in_turns(s):  # type: ignore[no-untyped-def]
    s += s.system("You are a helpful assistant.")
    s += sgl.assistant("Two tips for staying healthy: 1. Diet. 2. Exercise.\n\n")
    forks = s.fork(2)
    for i in range(2):
        forks[i] += sgl.assistant(f"Expand tip {i + 1}:\n" + sgl.gen("tip", max_tokens=8, stop="\n\n"))
    for i in range(2):
        s += sgl.assistant(f"Tip {i + 1}:" + forks[i]["tip"] + "\n")
    with s.user():
        s += "In summary?"
    s += sgl.assistant_begin()
    s += "It is " + sgl.gen(max_tokens=8) + sgl.gen("judged", choices=["good", "bad"])
    s += sgl.assistant_end()
    return s


def propose(s, name, n):  # type: ignore[no-untyped-def]
    s += sgl.user("Next: " + name)
    forks = s.fork(n)
    forks += sgl.assistant(sgl.gen(name, max_tokens=4))
    return forks


@sgl.function
def tree_search(s, question, n):  # type: ignore[no-untyped-def]
    s += sgl.user(question)
    states = [s]
    for name in ("plan", "solution"):
        states = [fork for state in states for fork in propose(state, name, n)]
    return [state.text() for state in states]


@sgl.function
def best_of(s, question):  # type: ignore[no-untyped-def]
    s += question
    for _ in range(2):
        forks = s.fork(2)
        forks += sgl.gen("word", max_tokens=3)
        forks.join()
        s += "|".join(s["word"])
    few_shot_qa(s, question=question)
    s += sgl.gen("sure", choices=["yes", "no"], choices_method=sgl.greedy_token_selection)
    s += sgl.gen_int("count", max_tokens=4) + sgl.gen("n", dtype=float, max_tokens=6)


def test_one_run_and_a_batch() -> None:
    state = few_shot_qa.run(question="What is the capital of France?")
    assert state.text().endswith("A:" + state["answer"])
    questions = [{"question": f"What is {i}?"} for i in range(3)]
    states = few_shot_qa.run_batch(questions, progress_bar=True, num_threads="auto")
    assert [f"What is {i}?" in states[i].text() for i in range(3)] == [True] * 3
    ordered = few_shot_qa.run_batch(questions, generator_style=True)
    assert [state["answer"] for state in ordered] == [state["answer"] for state in states]


def test_turns_and_streams() -> None:
    arguments: Any = {"question_1": "Where?", "question_2": "When?", "temperature": 0}
    whole = multi_turn.run(**arguments)
    assert [turn["role"] for turn in whole.messages()] == ["system", "user", "assistant", "user", "assistant"]
    state = multi_turn.run(**arguments, stream=True)
    assert "".join(state.text_iter(var_name="answer_2")) == whole["answer_2"]
    assert "".join(state.text_iter()) == whole.text()

    async def read() -> str:
        state = multi_turn.run(**arguments, stream=True)
        pieces = [
            (piece, meta) async for piece, meta in state.text_async_iter("answer_2", return_meta_data=True)
        ]
        assert pieces[-1][1]["finish_reason"] is not None
        return "".join(piece for piece, _ in pieces)

    assert asyncio.run(read()) == whole["answer_2"]


def test_control_flow_forks_and_grammars() -> None:
    state = tool_use.run(question="what is 2 + 2?", temperature=0)
    assert ("expression" in state) == (state["tool"] == "calculator")
    state = tips.run()
    assert state.text().count("Tip ") == 2
    state = parallel_sample.run(question="Compute 5 + 2.", n=3, temperature=1.0)
    assert len(state["reasoning"]) == len(state["tool"]) == 3
    state = address.run()
    assert state["whole"] == state["answer"]
    assert state["answer"].endswith(".0.0.1")


def test_turns_in_forks_trees_and_nested_functions() -> None:
    state = tips_in_turns()
    assert [turn["role"] for turn in state.messages()] == ["system", *["assistant"] * 3, "user", "assistant"]
    assert state.ret_value.text() == state.text()
    assert state.text().endswith(state["judged"] + "<|im_end|>\n")
    assert len(set(tree_search.run(question="2 + 2?", n=2).ret_value)) == 1  # the toy model is greedy
    state = best_of.run(question="Which?", temperature=0)
    assert len(state["word"]) == 2
    assert f"A:{state['answer']}{state['sure']}{state['count']}{state['n']}" in state.text()


@pytest.mark.parametrize("options", [(), ("--incremental-streaming-output",)], ids=["cumulative", "new"])
def test_a_server_gives_what_the_engine_gives(serve: Any, options: tuple[str, ...]) -> None:
    endpoint = sgl.RuntimeEndpoint(serve("--chat-template=chatml", *options).url)
    runs: list[tuple[Any, dict[str, Any]]] = [
        (multi_turn, {"question_1": "Where?", "question_2": "When?"}),
        (tips_in_turns, {}),
        (best_of, {"question": "Which?"}),
        (address, {}),
    ]
    for program, arguments in runs:
        expected = program.run(**arguments).text()
        assert program.run(**arguments, backend=endpoint).text() == expected
        assert "".join(program.run(**arguments, backend=endpoint, stream=True).text_iter()) == expected
