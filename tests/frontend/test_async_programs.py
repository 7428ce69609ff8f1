"""`async def` programs, and programs of an event loop that is not theirs."""

from __future__ import annotations

import asyncio

import pytest
from scripted_backend import ScriptedBackend, refuse

import gapless
from gapless import ProgramError, ProgramState, gen

LONG = "Some text that all programs share. " * 10


@gapless.function
async def ask(s: ProgramState, question: str) -> str:
    s += LONG + question + gen("x")
    return str(await s.get("x"))


def test_an_async_program_awaits_its_variables() -> None:
    backend = ScriptedBackend()
    state = ask.run("?", backend=backend)
    assert state.ret_value == state["x"] == f"<{len(LONG) + 1}>"
    states = ask.run_batch([{"question": "a"}, {"question": "b"}], backend=backend)
    assert [state["x"] for state in states] == [state["x"]] * 2
    assert backend.texts("commit") == [LONG]


def test_a_read_that_would_hold_up_the_loop_says_what_to_do() -> None:
    @gapless.function
    async def program(s: ProgramState) -> str:
        s += "a" + gen("x")
        for read in (lambda: s["x"], s.text, s.fork(2).join, lambda: ask.run("?")):
            with pytest.raises(ProgramError, match=r"await s.get\(name\).*program.run_async"):
                read()
        await s.ready()
        forks = s.fork(2)
        forks += "b" + gen("y")
        await forks.ready()
        forks.join()
        other = await ask.run_async("?")
        return "".join([s["x"], s.text(), *s["y"], other["x"]])

    gapless.set_default_backend(ScriptedBackend())
    assert program.run().ret_value == f"<1>a<1><5><5><{len(LONG) + 1}>"


def test_an_async_program_may_wait_for_other_things_and_streams() -> None:
    @gapless.function
    async def program(s: ProgramState) -> list[str]:
        s += "a" + gen("x")
        fork = s.fork(1)[0]
        fork += gen("y")
        pieces = [piece async for piece in fork.text_async_iter("y")]
        return [*await asyncio.gather(s.get("x"), fork.get("y")), "".join(pieces)]

    for stream in (False, True):
        state = program.run(backend=ScriptedBackend(), stream=stream)
        assert state.ret_value == ["<1>", "<4>", "<4>"]


def test_errors_of_async_programs() -> None:
    backend = ScriptedBackend(refuse)
    with pytest.raises(ProgramError, match=r"program 'ask', .*`s \+= LONG .*BackendError: the model is gone"):
        ask.run("?", backend=backend)

    @gapless.function
    async def program(s: ProgramState) -> None:
        await s.get("x")

    with pytest.raises(gapless.VariableError, match="'x' was never set"):
        program.run(backend=backend)


@gapless.function
def plain(s: ProgramState) -> str:
    s += "a" + gen("x")
    return str(s["x"])


def test_programs_from_the_callers_loop() -> None:
    async def main() -> list[object]:
        backend = ScriptedBackend(together=2)
        states = await asyncio.gather(
            plain.run_async(backend=backend), ask.run_async(question="?", backend=backend)
        )
        with pytest.raises(ProgramError, match="the model is gone"):
            await plain.run_async(backend=ScriptedBackend(refuse))
        return [state.ret_value for state in states]

    assert asyncio.run(main()) == ["<1>", f"<{len(LONG) + 1}>"]


@pytest.mark.parametrize("program", [plain, ask.bind(question="?")])
def test_cancelling_a_run_cancels_its_calls(program: gapless.frontend.function.Function) -> None:
    backend = ScriptedBackend(held=True)

    async def main() -> None:
        running = asyncio.create_task(program.run_async(backend=backend))
        await asyncio.to_thread(backend.called.wait, 30)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running

    asyncio.run(main())
    assert backend.cancelled.wait(30)
    assert backend.kinds() == ["generate"]


def test_an_async_part_of_an_async_program() -> None:
    @gapless.function
    async def whole(s: ProgramState) -> str:
        s += "w"
        return str(await ask(s, question="?"))

    assert whole.run(backend=ScriptedBackend()).ret_value == f"<{len(LONG) + 2}>"
