"""Batches: order, errors by item, how many are in flight, and the prefix that all share."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripted_backend import ScriptedBackend, counted, refuse

import gapless
from gapless import ProgramError, ProgramState, gen
from gapless.frontend.backends.base import Generated, Hint, Prompt
from gapless.frontend.batch import common_prefix
from gapless.frontend.expressions import Gen, RoleBegin, RoleEnd

LONG = "Some text that all programs share. " * 10


@gapless.function
def ask(s: ProgramState, question: str) -> str:
    s += LONG + "Q: " + question + "\n"
    s += "A: " + gen("answer")
    return str(s["answer"])


def test_states_come_in_order_and_the_shared_prefix_is_committed_first() -> None:
    backend = ScriptedBackend()
    states = ask.run_batch([{"question": "x" * i} for i in range(5)], backend=backend, temperature=0)
    assert [state["answer"] for state in states] == [f"<{len(LONG) + 7 + i}>" for i in range(5)]
    assert backend.kinds()[0] == "commit"
    assert backend.texts("commit") == [LONG + "Q: "]
    assert backend.kinds().count("generate") == 5
    assert backend.kinds()[-1] == "release"
    assert len({call.group for call in backend.calls}) == 6  # the batch's, and each program's
    assert all(call.params == {"temperature": 0} for call in backend.calls if call.kind == "generate")


def test_the_prefix_is_in_the_words_of_the_template() -> None:
    backend = ScriptedBackend()

    @gapless.function
    def chat(s: ProgramState, question: str) -> None:
        s += gapless.system(LONG) + gapless.user("Say " + question)
        s += gapless.assistant(gen("answer"))

    states = chat.run_batch([{"question": "ab"}, {"question": "ac"}], backend=backend)
    assert backend.texts("commit") == [f"[system]{LONG}[end][user]Say a"]
    assert [state.messages()[1]["content"] for state in states] == ["Say ab", "Say ac"]
    assert [state["answer"] for state in states] == [f"<{len(LONG) + 41}>"] * 2


@pytest.mark.parametrize("questions", [["only"], []])
@pytest.mark.parametrize("style", [False, True])
def test_small_batches_commit_nothing(questions: list[str], style: bool) -> None:
    backend = ScriptedBackend()
    items = [{"question": question} for question in questions]
    states = ask.run_batch(items, backend=backend, progress_bar=True, generator_style=style)
    assert [state.ret_value for state in states] == [f"<{len(LONG) + 11}>"] * len(questions)
    assert backend.texts("commit") == []


@pytest.mark.parametrize("style", [False, True])
def test_a_batch_in_a_program(style: bool) -> None:
    @gapless.function
    def outer(s: ProgramState) -> list[str]:
        states = ask.run_batch([{"question": "?"}] * 3, generator_style=style)
        return [state["answer"] for state in states]

    gapless.set_default_backend(ScriptedBackend())
    assert outer.run().ret_value == [f"<{len(LONG) + 8}>"] * 3


def test_a_short_prefix_is_not_committed() -> None:
    @gapless.function
    def short(s: ProgramState, question: str) -> None:
        s += "Q: " + question + gen("answer")

    backend = ScriptedBackend()
    assert len(short.run_batch([{"question": "a"}] * 3, backend=backend)) == 3
    assert backend.texts("commit") == []


@pytest.mark.parametrize("fails", [False, True])
def test_programs_may_end_before_the_shared_prefix_is_computed(fails: bool) -> None:
    @gapless.function
    def program(s: ProgramState, i: int) -> None:
        s += LONG + str(i) + gen("x")
        if fails and i == 1:
            raise RuntimeError("no more")

    backend = ScriptedBackend()
    states = program.run_batch([{"i": i} for i in range(3)], backend=backend)
    answered = [states[i] for i in range(3) if not (fails and i == 1)]
    assert [state["x"] for state in answered] == [f"<{len(LONG) + 1}>"] * len(answered)
    assert backend.kinds().count("generate") == len(answered)
    if fails:
        with pytest.raises(ProgramError, match="no more"):
            states[1]["x"]


def test_functions_run_once_each() -> None:
    runs = []

    @gapless.function
    def program(s: ProgramState, i: int) -> None:
        runs.append(i)
        s += LONG + str(i) + gen("x")

    program.run_batch([{"i": i} for i in range(100)], backend=ScriptedBackend())
    assert sorted(runs) == list(range(100))


def test_each_item_has_its_own_error() -> None:
    def answer(text: str, number: int) -> str:
        return refuse(text, number) if "bad" in text else counted(text, number)

    states = ask.run_batch([{"question": q} for q in ("a", "bad", "b")], backend=ScriptedBackend(answer))
    assert [state.error() is None for state in states] == [True, False, True]
    with pytest.raises(
        ProgramError, match=r"program 'ask', test_batch.py line .*BackendError: the model is gone"
    ):
        states[1]["answer"]
    assert states[2]["answer"] == f"<{len(LONG) + 8}>"


@pytest.mark.parametrize("style", [False, True])
def test_a_backend_that_is_down_fails_every_item(style: bool) -> None:
    class Down(ScriptedBackend):
        async def commit(self, *_: object) -> None:
            refuse("", 0)

    states = ask.run_batch([{"question": "?"}] * 3, backend=Down(refuse), generator_style=style)
    assert ["the model is gone" in str(state.error()) for state in states] == [True] * 3


@pytest.mark.parametrize(
    ("items", "options", "message"),
    [
        (
            [{"question": "a"}, {}],
            {},
            "item 1 of the batch: program 'ask': missing a required argument: 'question'",
        ),
        ([{"query": "a"}], {}, "item 0 of the batch: program 'ask': "),
        (["a"], {}, "item 0 of the batch: an item is a dict or a list of arguments, not str"),
        ([], {"num_threads": 0}, 'num_threads must be "auto" or at least 1, got 0'),
        ([], {"num_threads": "many"}, 'num_threads must be "auto" or at least 1'),
        ([], {"heat": 1}, "'heat' is no sampling parameter"),
    ],
)
def test_wrong_batches_are_refused_before_any_work(items: Any, options: Any, message: str) -> None:
    backend = ScriptedBackend()
    with pytest.raises((TypeError, ValueError), match=message):
        ask.run_batch(items, backend=backend, **options)
    assert not backend.calls


def test_items_may_be_positional_and_bound() -> None:
    @gapless.function
    def add(s: ProgramState, a: int, b: int, c: int = 0) -> int:
        return a + b + c

    states = add.bind(c=100).run_batch([(1, 2), [3, 4], {"a": 5, "b": 6}], backend=ScriptedBackend())
    assert [state.ret_value for state in states] == [103, 107, 111]


@pytest.mark.parametrize("limit", [1, 3])
def test_num_threads_is_how_many_are_in_flight(limit: int) -> None:
    backend = ScriptedBackend(together=limit)
    ask.run_batch([{"question": "?"}] * 9, backend=backend, num_threads=limit)
    assert backend.most_in_flight == limit


def test_ten_thousand_in_flight_take_no_threads() -> None:
    """No call is answered before all of them are there."""
    backend = ScriptedBackend(together=10_000)
    before = threading.active_count()
    most = []

    @gapless.function
    def program(s: ProgramState, i: int) -> str:
        s += f"item {i}:" + gen("x")
        answer = str(s["x"])
        most.append(threading.active_count())
        return answer

    states = program.run_batch([{"i": i} for i in range(10_000)], backend=backend)
    assert backend.most_in_flight == 10_000
    assert max(most) <= before + 1  # the loop's, which is started by the first program of the process
    assert [state.ret_value for state in states] == [f"<{len(f'item {i}:')}>" for i in range(10_000)]


def test_a_generator_gives_states_as_they_are_ready() -> None:
    backend = ScriptedBackend()
    states = ask.run_batch(
        [{"question": "x" * i} for i in range(200)], backend=backend, generator_style=True, num_threads=2
    )
    assert next(states).ret_value == f"<{len(LONG) + 7}>"
    assert [state.ret_value for state in states] == [f"<{len(LONG) + 7 + i}>" for i in range(1, 200)]
    assert backend.kinds()[-1] == "release"


def test_a_generator_that_is_closed_ends_what_is_in_flight() -> None:
    begun, cancelled = threading.Event(), threading.Event()

    class Endless(ScriptedBackend):
        async def generate(self, prompt: Prompt, params: Mapping[str, Any], hint: Hint) -> list[Generated]:
            if "second" not in prompt.text:
                return await super().generate(prompt, params, hint)
            begun.set()
            try:
                await asyncio.Event().wait()
            finally:
                cancelled.set()
            raise AssertionError

    items = [{"question": "first"}, {"question": "second"}]
    states = ask.run_batch(items, backend=Endless(), generator_style=True, num_threads=1)
    assert next(states).ret_value == f"<{len(LONG) + 12}>"
    assert begun.wait(30)
    states.close()
    assert cancelled.wait(30)


def test_the_bar(capsys: pytest.CaptureFixture[str]) -> None:
    def answer(text: str, number: int) -> str:
        return refuse(text, number) if "bad" in text else counted(text, number)

    items = [{"question": "bad" if i == 1 else "?"} for i in range(4)]
    ask.run_batch(items, backend=ScriptedBackend(answer), progress_bar=True)
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines()[-1].split("\r")[-1].startswith(f"[{'#' * 30}] 4/4, 1 failed, ")
    assert err.endswith(" s\n")


def test_the_common_prefix_of_programs() -> None:
    user, end = RoleBegin("user"), RoleEnd("user")
    assert common_prefix([["ab", "c", user], ["abc", user]]) == ["abc", user]
    assert common_prefix([["ab"], ["ac", user]]) == ["a"]
    assert common_prefix([[user, "ab", end], [user, "ab", end, "x"]]) == [user, "ab", end]
    assert common_prefix([[user], [RoleBegin("system")]]) == []
    assert common_prefix([["a"], []]) == []


LEAVES = st.lists(st.sampled_from(["a", "b", "ab", RoleBegin("user"), RoleEnd("user")]), max_size=6)


def spelled(leaves: list[Any]) -> list[Any]:
    """One item a character or mark."""
    return [part for leaf in leaves for part in (leaf if isinstance(leaf, str) else [leaf])]


@given(st.lists(LEAVES, min_size=1, max_size=4))
def test_the_common_prefix_is_the_longest(programs: list[list[Any]]) -> None:
    shared = spelled(common_prefix(programs))
    assert all(spelled(program)[: len(shared)] == shared for program in programs)
    following = [spelled(program)[len(shared) : len(shared) + 1] for program in programs]
    assert following[0] == [] or any(item != following[0] for item in following)
    assert not any(isinstance(leaf, Gen) for leaf in shared)
