"""What fails is told where it is needed, with its place and its origin, and nothing waits for ever."""

from __future__ import annotations

import os
import sys
import traceback
from typing import Any

import pytest
from scripted_backend import ScriptedBackend, counted, refuse

import gapless
from gapless import ProgramError, ProgramState, VariableError, gen
from gapless.frontend.backends.base import BackendError


def refuse_bad(text: str, number: int) -> str:
    return refuse(text, number) if "bad" in text else counted(text, number)


def test_a_failed_call_is_told_at_the_read_with_its_line() -> None:
    told = []

    @gapless.function
    def program(s: ProgramState) -> None:
        s += "bad" + gen("first")
        s += gen("second")
        for name in ("first", "second"):
            try:
                s[name]
            except ProgramError as error:
                told.append(error)
        s += "more" + gen("third")
        s["third"]

    with pytest.raises(ProgramError) as caught:
        program.run(backend=ScriptedBackend(refuse))
    assert str(caught.value) == (
        f"program 'program', test_failures.py line {program.__wrapped__.__code__.co_firstlineno + 2}, "
        '`s += "bad" + gen("first")`: BackendError: the model is gone'
    )
    assert isinstance(caught.value.__cause__, BackendError)
    assert told == [caught.value, caught.value]


def test_a_failure_that_is_handled_is_not_the_runs() -> None:
    @gapless.function
    def program(s: ProgramState) -> str:
        attempt = s.copy()
        attempt += "bad" + gen("x")
        try:
            return str(attempt["x"])
        except ProgramError:
            s += "good" + gen("x")
            return str(s["x"])

    state = program.run(backend=ScriptedBackend(refuse_bad))
    assert (state.ret_value, state.text(), state.error()) == ("<4>", "good<4>", None)


def test_a_forks_failure_that_nobody_has_seen_is_the_runs() -> None:
    @gapless.function
    def program(s: ProgramState) -> None:
        s.fork(2).__iadd__("bad" + gen("x"))

    with pytest.raises(ProgramError, match=r"'program', fork 0 of 2, test_failures.py line"):
        program.run(backend=ScriptedBackend(refuse_bad))


def test_a_failed_fork_does_not_hang_the_join() -> None:
    """The others end first, and the join names the failed one."""
    backend = ScriptedBackend(refuse_bad)

    @gapless.function
    def program(s: ProgramState) -> None:
        forks = s.fork(3)
        forks += ["good", "bad", "good"]
        forks += gen("x") + gen("y")
        try:
            forks.join()
        finally:
            s += f"{forks[2]['y']} {[fork.error() is None for fork in forks]}"

    with pytest.raises(ProgramError, match=r"fork 1 of 3, .*the model is gone"):
        program.run(backend=backend)
    (state,) = program.run_batch([{}], backend=backend)
    assert repr(state) == "ProgramState(<7> [True, False, True])"


def test_a_failed_parent_fails_its_forks() -> None:
    @gapless.function
    def program(s: ProgramState) -> None:
        s += "bad" + gen("x")
        forks = s.fork(2)
        forks += gen("y")
        grandchild = forks[0].fork(2)[1]
        for read in (lambda: forks[1]["y"], forks.join, grandchild.text, lambda: s.fork(2).join()):
            with pytest.raises(ProgramError, match=r'`s \+= "bad" \+ gen\("x"\)`: BackendError'):
                read()

    program.run(backend=ScriptedBackend(refuse_bad))


def test_what_the_function_raises_has_its_line_and_ends_its_calls() -> None:
    backend = ScriptedBackend(held=True)

    @gapless.function
    def program(s: ProgramState) -> None:
        s += gen("x")
        fork = s.fork(1)[0]
        fork += gen("y")
        int("seven")

    with pytest.raises(
        ProgramError, match=r'line \d+, `int\("seven"\)`: ValueError: invalid literal'
    ) as caught:
        program.run(backend=backend)
    assert isinstance(caught.value.__cause__, ValueError)
    assert "seven" in "".join(traceback.format_exception(caught.value))
    assert all(call.cancelled for call in backend.calls)


@pytest.mark.parametrize("leave", [sys.exit, lambda: os.fspath(3)])  # type: ignore[call-overload]
def test_a_function_that_leaves_takes_nobody_with_it(leave: Any) -> None:
    backend = ScriptedBackend()

    @gapless.function
    def program(s: ProgramState, stay: bool) -> None:
        s += gen("x")
        s["x"]
        if not stay:
            leave()

    states = program.run_batch([{"stay": True}, {"stay": False}, {"stay": True}], backend=backend)
    assert [state.error() is None for state in states] == [True, False, True]


def test_a_variable_that_was_never_set() -> None:
    backend = ScriptedBackend()

    @gapless.function
    def program(s: ProgramState, name: str) -> None:
        s += gen("answer") + gen("tool")
        s[name]

    with pytest.raises(
        VariableError,
        match=r"^program 'program': the variable 'anwser' was never set; those that exist: 'answer', 'tool'$",
    ) as caught:
        program.run(name="anwser", backend=backend)
    assert isinstance(caught.value, KeyError)
    state = program.run(name="answer", backend=backend)
    for read in (state.__getitem__, state.get_meta_info, lambda name: list(state.text_iter(name))):
        with pytest.raises(VariableError, match="'none' was never set"):
            read("none")


def test_in_a_scope_its_variable_is_not_there_yet() -> None:
    @gapless.function
    def program(s: ProgramState) -> None:
        with s.var_scope("x"):
            s["x"]

    with pytest.raises(VariableError, match="'x' was never set; those that exist: none"):
        program.run(backend=ScriptedBackend())


@pytest.mark.parametrize("stream", [False, True])
def test_reads_of_a_failed_run_raise_its_error(stream: bool) -> None:
    @gapless.function
    def program(s: ProgramState) -> None:
        s += "a" + gen("good")
        s["good"]
        raise RuntimeError("no more")

    backend = ScriptedBackend()
    if stream:
        state = program.run(backend=backend, stream=True)
    else:
        (state,) = program.run_batch([{}], backend=backend)
    error = state.error()
    assert "RuntimeError: no more" in str(error)
    for read in (
        lambda: state["good"], lambda: state["later"], state.text, state.messages, state.sync,
        lambda: state.get_meta_info("good"), lambda: state.ret_value,
    ):  # fmt: skip
        with pytest.raises(ProgramError) as caught:
            read()
        assert caught.value is error
    assert repr(state) == "ProgramState(a<1>)"


def test_a_backend_that_fails_to_commit_or_to_release() -> None:
    class Failing(ScriptedBackend):
        async def commit(self, *_: object) -> None:
            raise BackendError("no commit")

        async def release(self, group: str) -> None:
            raise BackendError("no release")

    @gapless.function
    def program(s: ProgramState, fork: bool) -> None:
        s += "a" * 300 + gen("x")
        if fork:
            s.fork(2)

    with pytest.raises(ProgramError, match=r"`s.fork\(2\)`: BackendError: no commit"):
        program.run(fork=True, backend=Failing())
    states = program.run_batch([{"fork": False}] * 2, backend=Failing())
    assert [state["x"] for state in states] == ["<300>"] * 2
