"""The one event loop of the programs: waits from anywhere, and life after a fork of the process."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from contextvars import ContextVar
from pathlib import Path

import pytest

import gapless
from gapless.frontend.loop import Signal, in_fiber, the_loop


async def doubled(value: int) -> int:
    await asyncio.sleep(0)
    return 2 * value


async def failing() -> None:
    await asyncio.sleep(0)
    raise LookupError("not there")


def test_a_wait_from_another_thread() -> None:
    loop = the_loop()
    assert loop.wait(doubled(4)) == 8
    with pytest.raises(LookupError, match="not there"):
        loop.wait(failing())
    assert not loop.is_here()
    assert the_loop() is loop


def test_a_wait_in_a_plain_function_on_the_loop() -> None:
    loop = the_loop()

    def plain() -> list[int]:
        assert loop.is_here()
        with pytest.raises(LookupError, match="not there"):
            loop.wait(failing())
        return [loop.wait(doubled(i)) for i in range(3)]

    assert loop.wait(in_fiber(plain)) == [0, 2, 4]


def test_functions_take_turns() -> None:
    """Each one waits for the other."""
    loop, order = the_loop(), list[str]()

    async def both() -> None:
        events = {"a": asyncio.Event(), "b": asyncio.Event()}

        def plain(name: str, other: str) -> None:
            for _ in range(2):
                loop.wait(events[name].wait())
                events[name].clear()
                order.append(name)
                events[other].set()

        events["a"].set()
        await asyncio.gather(in_fiber(lambda: plain("a", "b")), in_fiber(lambda: plain("b", "a")))

    loop.wait(both())
    assert order == ["a", "b", "a", "b"]


def test_a_cancelled_function_can_clean_up() -> None:
    loop, seen = the_loop(), list[str]()

    async def cancel() -> None:
        def plain() -> None:
            try:
                loop.wait(asyncio.Event().wait())
            finally:
                seen.append(str(loop.wait(doubled(1))))

        task = asyncio.create_task(in_fiber(plain))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    loop.wait(cancel())
    assert seen == ["2"]


def test_context_variables_are_those_of_the_caller() -> None:
    variable: ContextVar[int] = ContextVar("variable")
    variable.set(3)

    def plain() -> int:
        the_loop().wait(doubled(1))
        return variable.get()

    assert the_loop().wait(in_fiber(plain)) == 3


def test_a_signal_wakes_all_and_survives_who_gives_up() -> None:
    async def use() -> None:
        signal = Signal()
        tasks = [asyncio.create_task(signal.wait()) for _ in range(3)]
        await asyncio.sleep(0)
        tasks[1].cancel()
        await asyncio.sleep(0)
        signal.notify()
        await asyncio.gather(tasks[0], tasks[2])

    asyncio.run(use())


CODE = """
import os, sys, warnings
sys.path.insert(0, {support!r})
from scripted_backend import ScriptedBackend
import gapless

@gapless.function
def program(s):
    s += "abc" + gapless.gen("x")
    return s["x"]

print(program.run(backend=ScriptedBackend()).ret_value, flush=True)
warnings.simplefilter("ignore")
child = os.fork()
if child == 0:
    print(program.run(backend=ScriptedBackend()).ret_value, flush=True)
else:
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_forked_process_has_a_loop_of_its_own_and_both_end() -> None:
    support = str(Path(__file__).parent.parent / "support")
    ended = subprocess.run(
        [sys.executable, "-P", "-c", CODE.format(support=support)], capture_output=True, text=True, timeout=60
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "<3>\n<3>\n", "")


def test_the_thread_starts_with_the_first_program() -> None:
    code = "import gapless, threading; gapless.function(print); print(threading.active_count())"
    ended = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=60)
    assert ended.stdout == "1\n"


@pytest.mark.parametrize("name", gapless.__all__)
def test_all_public_names_are_there(name: str) -> None:
    assert getattr(gapless, name) is not None
