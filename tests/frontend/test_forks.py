"""Forks: one prefix, many ends that run at the same time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from scripted_backend import ScriptedBackend

import gapless
from gapless import ProgramState, gen
from gapless.frontend.forks import Forks


@pytest.fixture
def model() -> ScriptedBackend:
    backend = ScriptedBackend()
    gapless.set_default_backend(backend)
    return backend


def test_a_fork_commits_its_prefix_once_and_shares_a_group(model: ScriptedBackend) -> None:
    @gapless.function
    def program(s: ProgramState) -> None:
        s += "ab"
        forks = s.fork(3)
        for i, f in enumerate(forks):
            f += str(i) + gen("x")
        again = s.fork(2)
        again += gen("y")
        s += "=" + forks[0]["x"] + forks[2]["x"] + gen("z")

    state = program.run()
    assert state.text() == "ab=<3><3><9>"
    assert model.kinds() == ["commit"] + ["generate"] * 6 + ["release"]
    assert model.texts("commit") == ["ab"]
    assert sorted(model.texts()[:5]) == ["ab", "ab", "ab0", "ab1", "ab2"]
    assert len({call.group for call in model.calls}) == 1
    program.run()
    assert len({call.group for call in model.calls}) == 2


def test_a_fork_after_more_text_commits_again(model: ScriptedBackend) -> None:
    @gapless.function
    def program(s: ProgramState) -> None:
        s += "a"
        s.fork(2)
        s += "b"
        inner = s.fork(2)[0]
        inner += "c"
        inner.fork(2)

    program.run()
    assert model.texts("commit") == ["a", "ab", "abc"]


@pytest.mark.parametrize("make", [lambda s: s.fork(2)[0], lambda s: s.copy(), lambda s: s.fork()[0]])
def test_no_prefill_of_nothing_and_none_for_one_branch(model: ScriptedBackend, make: Any) -> None:
    @gapless.function
    def program(s: ProgramState) -> str:
        first = make(s)
        first += "one" + gen("x")
        return str(first["x"])

    assert program.run().ret_value == "<3>"
    assert model.texts("commit") == []

    @gapless.function
    def copying(s: ProgramState) -> str:
        s += "some"
        with s.copy() as other:
            other += gen("x")
        return other.text() + s.text()

    assert copying.run().ret_value == "some<4>some"
    assert model.texts("commit") == []


def test_branches_run_at_the_same_time_and_with_their_parent() -> None:
    """The backend answers nobody before four calls are there."""
    backend = ScriptedBackend(together=4)

    @gapless.function
    def program(s: ProgramState) -> str:
        forks = s.fork(3)
        forks += gen("x")
        s += gen("own")
        return str(forks[1]["x"])

    assert program.run(backend=backend).ret_value == "<0>"
    assert backend.most_in_flight == 4


def test_branches_begin_with_what_their_parent_has_by_then(model: ScriptedBackend) -> None:
    """A fork does not wait for its parent's calls; its branches do."""

    @gapless.function
    def program(s: ProgramState) -> tuple[str, str]:
        s += "a" + gen("x")
        fork = s.fork(1)[0]
        s += "later"
        early = not model.texts()
        fork += "b" + gen("y")
        assert early
        return fork["x"], fork["y"]

    state = program.run()
    assert state.ret_value == ("<1>", "<5>")
    assert model.texts() == ["a", "a<1>b"]
    assert state.text() == "a<1>later"


def test_join_gathers_what_the_parent_did_not_have(model: ScriptedBackend) -> None:
    @gapless.function
    def program(s: ProgramState) -> None:
        s += gen("mine")
        forks = s.fork(2)
        forks += gen("theirs") + gen("mine")
        forks[1].set_var("second", 2)
        forks.join()

    state = program.run()
    assert state["mine"] == "<0>"
    assert state["theirs"] == ["<3>", "<3>"]
    assert state["second"] == [None, 2]
    assert state.get_meta_info("theirs") == [{"prompt_chars": 3}] * 2
    assert state.text() == "<0>"


def test_join_can_append_the_branches_texts(model: ScriptedBackend) -> None:
    @gapless.function
    def program(s: ProgramState) -> None:
        s += "a"
        forks = s.fork(2)
        forks += lambda i: f"[{i}" + gen() + "]"
        forks.join("concate_and_append")
        s += gen("x")

    state = program.run()
    assert state.text() == "a[0<3>][1<3>]<13>"
    assert "x" in state


@pytest.mark.parametrize(
    ("what", "texts"),
    [
        ("!", ["!", "!"]),
        (["x", "y"], ["x", "y"]),
        (lambda i: str(i), ["0", "1"]),
        (gapless.user("u"), ["[user]u[end]"] * 2),
    ],
)
def test_ways_to_append_to_all(model: ScriptedBackend, what: Any, texts: list[str]) -> None:
    @gapless.function
    def program(s: ProgramState) -> list[str]:
        with s.fork(2) as forks:
            forks += what
        return [fork.text() for fork in forks]

    assert program.run().ret_value == texts


def replaced(forks: Forks) -> None:
    forks[0] = forks[1]


def appended_too_few(forks: Forks) -> None:
    forks += ["a"]


def appended_to_one(forks: Forks) -> None:
    forks[1] += "b"
    assert [fork.text() for fork in forks] == ["", "b"]


@pytest.mark.parametrize(
    ("action", "error", "message"),
    [
        (lambda forks: forks.join("some"), ValueError, "gather_variable or concate_and_append, got 'some'"),
        (replaced, TypeError, "cannot be replaced"),
        (appended_too_few, ValueError, "1 items for 2 forks"),
        (lambda forks: forks[0].fork(0), ValueError, "size of at least 1, got 0"),
        (
            lambda forks: forks.gather("x"),
            gapless.VariableError,
            "fork 0 of 2: the variable 'x' was never set",
        ),
    ],
)
def test_wrong_uses(
    model: ScriptedBackend, action: Callable[[Forks], object], error: type[Exception], message: str
) -> None:
    @gapless.function
    def program(s: ProgramState) -> None:
        forks = s.fork(2)
        with pytest.raises(error, match=message):
            action(forks)
        appended_to_one(forks)

    program.run()


def test_gather_and_inherited_variables_and_turns(model: ScriptedBackend) -> None:
    @gapless.function
    def program(s: ProgramState) -> list[str]:
        s += gapless.user("q") + gapless.assistant_begin() + "so "
        s.set_var("given", 1)
        forks = s.fork(2)
        forks += gen("x") + gapless.assistant_end()
        assert forks.gather("given") == [1, 1]
        assert forks[0].messages()[1] == {"role": "assistant", "content": "so <26>"}
        s += gapless.assistant_end()
        assert len(forks) == len(list(forks)) == 2
        return forks.gather("x")

    state = program.run()
    assert state.ret_value == ["<26>", "<26>"]
    assert state.messages()[1] == {"role": "assistant", "content": "so "}


def test_forks_of_forks(model: ScriptedBackend) -> None:
    @gapless.function
    def program(s: ProgramState) -> list[Any]:
        outer = s.fork(2)
        for i, fork in enumerate(outer):
            fork += str(i)
            inner = fork.fork(2)
            inner += lambda j: str(j) + gen("x")
            inner.join()
        outer.join()
        return [s["x"], model.texts()]

    found, texts = program.run().ret_value
    assert found == [["<2>", "<2>"], ["<2>", "<2>"]]
    assert sorted(texts) == ["00", "01", "10", "11"]
