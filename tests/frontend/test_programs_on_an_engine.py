"""Every primitive on an engine with the toy model, whose text after a prompt is known in closed form."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from scripted_backend import ScriptedBackend

import gapless
from gapless import Engine, ProgramState, gen, gen_int, select
from gapless.runtime.model.toy import ToyKnobs, toy_output
from gapless.runtime.tokenizer.byte_tokenizer import ByteTokenizer

TOKENIZER = ByteTokenizer()
COUNT = 8
PARAMS = {"max_new_tokens": COUNT, "ignore_eos": True}


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine("toy", chat_template="chatml", page_size=1) as engine:
        yield engine
        assert engine.flush_cache(timeout=30)  # nothing is held


@pytest.fixture(autouse=True)
def use_engine(no_default_backend: None, engine: Engine) -> None:
    gapless.set_default_backend(engine)


def said(prompt: str, count: int = COUNT) -> str:
    """What the toy model says after `prompt`."""
    return TOKENIZER.decode(toy_output(ToyKnobs(), TOKENIZER.encode(prompt), count))


@gapless.function
def two_turns(s: ProgramState, question: str) -> None:
    s += "Q: " + question + "\nA: " + gen("first")
    s += "\nQ: And then?\nA: " + gen("second", max_tokens=3)


@pytest.mark.parametrize("stream", [False, True])
def test_calls_in_order(stream: bool) -> None:
    state = two_turns.run(question="Why?", stream=stream, **PARAMS)
    first = said("Q: Why?\nA: ")
    second = said(f"Q: Why?\nA: {first}\nQ: And then?\nA: ", 3)
    assert "".join(state.text_iter("second")) == second
    assert state.text() == f"Q: Why?\nA: {first}\nQ: And then?\nA: {second}"
    assert state.get_meta_info("second")["completion_tokens"] == 3


def test_forks_share_their_prefix() -> None:
    prefix = "Some shared words before the branches: "

    @gapless.function
    def program(s: ProgramState) -> None:
        s += prefix
        forks = s.fork(3)
        forks += lambda i: f"({i})" + gen("x")
        forks.join()
        s += "".join(s["x"]) + gen("end")

    state = program.run(**PARAMS)
    branches = [said(f"{prefix}({i})") for i in range(3)]
    assert state["x"] == branches
    assert state["end"] == said(prefix + "".join(branches))
    shared = len(TOKENIZER.encode(prefix))
    assert [meta["cached_tokens"] >= shared for meta in state.get_meta_info("x")] == [True] * 3


def test_samples() -> None:
    @gapless.function
    def program(s: ProgramState) -> None:
        s += "Three: " + gen("x", n=3)

    assert program.run(temperature=0, **PARAMS)["x"] == [said("Three: ")] * 3


@pytest.mark.parametrize("method", ["token_length_normalized", "greedy_token_selection"])
def test_a_choice_and_what_follows_it(method: str) -> None:
    @gapless.function
    def program(s: ProgramState) -> None:
        s += "It is " + select("color", ["red", "green", "blue"], choices_method=method) + "." + gen("x")

    state = program.run(**PARAMS)
    scores = state.get_meta_info("color")["scores"]
    assert state["color"] == ["red", "green", "blue"][scores.index(max(scores))]
    assert state["x"] == said(f"It is {state['color']}.")


def test_turns_are_written_by_the_chat_template() -> None:
    @gapless.function
    def program(s: ProgramState) -> None:
        s += gapless.system("Be brief.") + gapless.user("Hi")
        with s.assistant():
            s += "Well, " + gen("x")

    state = program.run(**PARAMS)
    prompt = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nWell, "
    assert state["x"] == said(prompt)
    assert state.messages()[2] == {"role": "assistant", "content": "Well, " + said(prompt)}


def test_constrained_text() -> None:
    @gapless.function
    def program(s: ProgramState) -> None:
        s += "A number: " + gen_int("n", 3) + " and a word: " + gen("w", 4, regex="[ab]+")

    state = program.run()
    assert re.fullmatch(r"-?\d+", state["n"])
    assert re.fullmatch("[ab]+", state["w"])


def test_a_batch() -> None:
    shared = "The same long instructions for everybody. " * 8

    @gapless.function
    def program(s: ProgramState, i: int) -> None:
        s += shared + f"Number {i}: " + gen("x")

    states = program.run_batch([{"i": i} for i in range(40)], num_threads=16, **PARAMS)
    assert [state["x"] for state in states] == [said(f"{shared}Number {i}: ") for i in range(40)]
    cached = [state.get_meta_info("x")["cached_tokens"] for state in states]
    assert min(cached) >= len(TOKENIZER.encode(shared)) - 1  # the last one may be part of another token


def test_a_refused_call_has_its_line() -> None:
    @gapless.function
    def program(s: ProgramState) -> None:
        s += "a" + gen("x", top_p=7)

    with pytest.raises(
        gapless.ProgramError, match=r"`s \+= \"a\" \+ gen\(\"x\", top_p=7\)`: BackendError: top_p"
    ):
        program.run()


def test_another_backend_for_one_run() -> None:
    state = two_turns.run(question="?", backend=ScriptedBackend())
    assert state["first"] == "<8>"
