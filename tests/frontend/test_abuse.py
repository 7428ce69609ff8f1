"""Programs that do what they should not: an error that says so, or what was meant; and nothing hangs or is kept."""

from __future__ import annotations

import asyncio
import gc
import io
import subprocess
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scripted_backend import ScriptedBackend, refuse
from scripted_server import scripted_server

import gapless
from gapless import Engine, ProgramError, ProgramState, gen, select
from gapless.frontend import run as run_module
from gapless.frontend.branch import Branch
from gapless.frontend.loop import _Fiber

DEEP = 3 * sys.getrecursionlimit() // 2


@pytest.mark.parametrize("make", [lambda: gen(["x"]), lambda: select(7, ["a", "b"]), lambda: gen(b"x")])
def test_a_variables_name_is_a_string(make: Callable[[], object]) -> None:
    with pytest.raises(TypeError, match="a variable's name must be a string, got"):
        make()


def test_a_scopes_name_is_a_string_before_anything_is_appended() -> None:
    @gapless.function
    def program(s: ProgramState) -> None:
        with pytest.raises(TypeError, match="must be a string, got 3"), s.var_scope(3):  # type: ignore[arg-type]
            s += "never"

    assert program.run(backend=ScriptedBackend()).text() == ""


def test_scopes_of_one_name_in_one_another() -> None:
    """As a helper that calls itself has them. Each ends with the text since its own beginning."""
    seen = []

    @gapless.function
    def program(s: ProgramState, depth: int) -> None:
        with s.var_scope("whole"):
            s += f"({depth}"
            if depth:
                program(s, depth - 1)
                seen.append(s["whole"])
            s += ")"

    state = program.run(2, backend=ScriptedBackend())
    assert (seen, state["whole"]) == (["(0)", "(1(0))"], "(2(1(0)))")


def test_a_turn_ends_where_its_block_raises() -> None:
    @gapless.function
    def program(s: ProgramState) -> str:
        try:
            with s.user(), s.var_scope("part"):
                s += "a"
                int("seven")
        except ValueError:
            s += gapless.assistant(gen("x"))
        return str(s["part"])

    state = program.run(backend=ScriptedBackend())
    assert (state.text(), state.ret_value) == ("[user]a[end][assistant]<23>[end]", "a")


def test_a_turn_said_by_the_state_and_appended_is_said_once() -> None:
    @gapless.function
    def program(s: ProgramState) -> None:
        s += s.system("a")
        s.user("b")
        with pytest.raises(TypeError, match="not of int"):
            s.user(5)  # type: ignore[arg-type]
        s += s.assistant(gen("x"))

    state = program.run(backend=ScriptedBackend())
    assert state.messages() == [
        {"role": "system", "content": "a"},
        {"role": "user", "content": "b"},
        {"role": "assistant", "content": "<37>"},
    ]


def test_a_programs_function_does_not_yield() -> None:
    def plain(s: ProgramState) -> Any:
        yield s

    async def asynchronous(s: ProgramState) -> Any:
        yield s

    for function in (plain, asynchronous):
        with pytest.raises(TypeError, match=rf"'{function.__name__}' must not yield"):
            gapless.function(function)


def test_any_integer_is_a_forks_size() -> None:
    @gapless.function
    def program(s: ProgramState) -> int:
        with pytest.raises(TypeError, match="float"):
            s.fork(2.0)  # type: ignore[arg-type]
        return len(s.fork(np.int64(2)))  # type: ignore[arg-type]

    assert program.run(backend=ScriptedBackend()).ret_value == 2


@pytest.mark.parametrize("answer", [None, refuse])
def test_forks_of_forks_deeper_than_the_stack(answer: Any) -> None:
    """They come, or all of them fail with the first one's error."""

    @gapless.function
    def program(s: ProgramState) -> str:
        s += "a" + gen("x")
        last = s
        for _ in range(DEEP):
            last = last.copy()
        last += gen("y")
        return str(last["y"])

    if answer is None:
        assert program.run(backend=ScriptedBackend()).ret_value == "<4>"
        return
    with pytest.raises(ProgramError, match=r'`s \+= "a" \+ gen\("x"\)`: BackendError: the model is gone'):
        program.run(backend=ScriptedBackend(answer))


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt, asyncio.CancelledError, StopIteration])
def test_a_backend_that_raises_anything_fails_its_call_alone(error: type[BaseException]) -> None:
    def answer(text: str, number: int) -> str:
        if text == "bad":
            raise error("oh")
        return "good"

    @gapless.function
    def program(s: ProgramState, text: str) -> None:
        s += text + gen("x")

    states = program.run_batch([["good"], ["bad"], ["good"]], backend=ScriptedBackend(answer))
    assert [state.error() is None for state in states] == [True, False, True]


def test_an_expression_in_an_f_string_is_an_error() -> None:
    with pytest.raises(TypeError, match=r"Gen\(name='x', .* is not text: write it outside of the f-string"):
        f"Answer: {gen('x')}"


class Broken(io.StringIO):
    def write(self, text: str) -> int:
        raise BrokenPipeError


@pytest.mark.parametrize("stderr", [None, Broken()])
def test_a_batch_goes_on_without_its_bar(stderr: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    @gapless.function
    def program(s: ProgramState) -> None:
        s += "a" + gen("x")

    monkeypatch.setattr(sys, "stderr", stderr)
    states = program.run_batch([{}] * 3, backend=ScriptedBackend(), progress_bar=True)
    assert [state["x"] for state in states] == ["<1>"] * 3


def test_a_server_that_hangs_does_not_hold_up_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    class Hanging(ScriptedBackend):
        async def release(self, group: str) -> None:
            await asyncio.Event().wait()

    monkeypatch.setattr(run_module, "_RELEASE_SECONDS", 0.01)

    @gapless.function
    def program(s: ProgramState) -> None:
        s += "text"
        s.fork(2)

    assert program.run(backend=Hanging()).text() == "text"


@pytest.mark.parametrize("fails", [False, True])
def test_nothing_of_ended_runs_is_kept(fails: bool) -> None:
    refs = []

    @gapless.function
    def program(s: ProgramState) -> ProgramState:
        refs.append(weakref.ref(s))
        s += "a" + gen("x")
        forks = s.fork(2)
        forks += gen("y")
        forks.join()
        if fails:
            int("seven")
        return s

    states = program.run_batch([{}] * 1000, backend=ScriptedBackend())
    assert sum(state.error() is not None for state in states) == 1000 * fails
    del states
    gc.collect()
    assert sum(ref() is not None for ref in refs) == 0
    assert not any(type(kept) in (_Fiber, Branch) for kept in gc.get_objects())


def test_an_engine_is_at_rest_after_runs_that_were_ended_in_every_way() -> None:
    @gapless.function
    def program(s: ProgramState, count: int, fail: str = "") -> None:
        s += "what the forks share, more than a page of it: " * 2 + gen("x", max_tokens=4)
        forks = s.fork(3)
        forks += gen("y", max_tokens=count, ignore_eos=True)
        if fail == "function":
            int("seven")
        if fail == "call":
            forks[1] += gen("z", temperature=-1)
        forks.join()

    async def cancelled() -> None:
        running = asyncio.create_task(program.run_async(3000, backend=engine))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await running

    with Engine("toy") as engine:
        items = [{"count": 4, "fail": fail} for fail in ("", "function", "call", "")] * 5
        states = program.run_batch(items, backend=engine)
        assert [state.error() is None for state in states] == [True, False, False, True] * 5
        asyncio.run(cancelled())
        given_up = program.run_batch(
            [{"count": 8}] + [{"count": 3000}] * 5, backend=engine, generator_style=True
        )
        assert next(given_up).error() is None
        given_up.close()
        flushed = engine.flush_cache(timeout=30)
        assert flushed.success, flushed.message


def test_a_server_that_is_killed_fails_what_runs_on_it(serve: Any) -> None:
    server = serve("--toy", "delay_ms=5")

    @gapless.function
    def program(s: ProgramState) -> None:
        s += "a" + gen("x", max_tokens=3000, ignore_eos=True)

    state = program.run(backend=server.url, stream=True)
    pieces = state.text_iter("x")
    next(pieces)
    server.process.kill()
    server.process.wait(30)
    with pytest.raises(ProgramError, match=r'`s \+= "a" \+ gen\("x", .*BackendError: POST .*/generate: '):
        list(pieces)
    assert "BackendError" in str(state.error())


IN_A_CHILD = """
import os, sys, warnings
sys.path.insert(0, {support!r})
from scripted_backend import ScriptedBackend
import gapless

@gapless.function
def program(s):
    s += "abc" + gapless.gen("x", max_tokens=3)
    return s["x"]

endpoint = gapless.RuntimeEndpoint({url!r})
print(program.run(backend=endpoint).ret_value, flush=True)
backend = ScriptedBackend(held=True)
running = program.run(backend=backend, stream=True)
backend.called.wait(30)
warnings.simplefilter("ignore")
child = os.fork()
if child == 0:
    try:
        running.text()
    except gapless.ProgramError as error:
        print(error, flush=True)
    print(program.run(backend=endpoint).ret_value, flush=True)
    os._exit(0)
print("child:", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
print(program.run(backend=endpoint).ret_value)
backend.let_go()
print(running["x"])
"""


def test_a_forked_process_uses_a_server_and_waits_for_nothing_of_its_parents() -> None:
    with scripted_server() as url:
        code = IN_A_CHILD.format(support=str(Path(__file__).parent.parent / "support"), url=url)
        ended = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.splitlines() == [
        "bcd",
        "program 'program' does not run in this process, which was forked meanwhile",
        "bcd",
        "child: 0",
        "bcd",
        "<3>",
    ]


AT_THE_END = """
import sys, threading
sys.path.insert(0, {support!r})
from scripted_backend import ScriptedBackend
import gapless

@gapless.function
def program(s):
    with s.user(), s.var_scope("whole"):
        s += "abc" + gapless.gen("x")
        s["x"]

backend = ScriptedBackend(held=True)
running = program.run(backend=backend, stream=True)
threading.Thread(target=program.run, kwargs=dict(backend=backend), daemon=True).start()
batch = program.run_batch([{{}}] * 9, backend=backend, generator_style=True)
threading.Thread(target=next, args=[batch], daemon=True).start()
backend.called.wait(30)
"""


def test_the_interpreter_ends_quietly_while_programs_run() -> None:
    code = AT_THE_END.format(support=str(Path(__file__).parent.parent / "support"))
    command = [sys.executable, "-P", "-W", "error", "-c", code]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")
