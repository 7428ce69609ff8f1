"""Text as it comes, for the caller, for coroutines of any loop, and for programs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from itertools import pairwise
from typing import Any

import pytest
from scripted_backend import Call, ScriptedBackend, refuse

import gapless
from gapless import ProgramError, ProgramState, gen, select
from gapless.frontend.backends.base import Generated


@gapless.function
def program(s: ProgramState) -> None:
    s += "Q" + gen("a") + "-" + gen("b") + "."


def test_a_variable_and_the_text_arrive_in_pieces() -> None:
    backend = ScriptedBackend(lambda text, _: "xyz")
    state = program.run(backend=backend, stream=True)
    assert "".join(state.text_iter("b")) == "xyz"
    assert "".join(state.text_iter()) == "Qxyz-xyz."
    assert backend.kinds() == ["stream", "stream"]
    assert (state["a"], state.text(), state.get_meta_info("a")) == ("xyz", "Qxyz-xyz.", {"pieces": 3})


def test_pieces_come_before_the_end_of_their_call() -> None:
    class Slow(ScriptedBackend):
        async def stream(self, *_: Any) -> AsyncIterator[Generated]:
            yield Generated("one")
            await self._record(Call("stream", "", None))
            yield Generated("two", {"last": True})

    backend = Slow(held=True)
    state = program.run(backend=backend, stream=True)
    text, variable = state.text_iter(), state.text_iter("a")
    assert next(variable) == "one"
    assert "Qone".startswith(next(text))
    assert backend.called.wait(30)
    backend.let_go()
    assert "".join(variable) == "two"
    assert state.text() == "Qonetwo-onetwo."
    assert state.get_meta_info("b") == {"last": True}


def test_without_stream_there_is_one_piece() -> None:
    state = program.run(backend=ScriptedBackend())
    assert list(state.text_iter()) == ["Q<1>-<5>."]
    assert list(state.text_iter(var_name="a")) == ["<1>"]


def test_samples_and_choices_stream_too() -> None:
    @gapless.function
    def several(s: ProgramState) -> None:
        s += gen("n", n=2) + select("c", ["<0>", "<3>"])

    state = several.run(backend=ScriptedBackend(lambda text, n: f"<{len(text)}>"), stream=True)
    assert list(state.text_iter("c")) == ["<3>"]
    assert list(state.text_iter("n")) == ["<0>"]
    assert state["n"] == ["<0>", "<0>"]


def test_coroutines_of_another_loop() -> None:
    async def read() -> tuple[list[Any], str]:
        state = program.run(backend=ScriptedBackend(lambda text, _: "xyz"), stream=True)
        pairs = [pair async for pair in state.text_async_iter(var_name="b", return_meta_data=True)]
        text = "".join([piece async for piece in state.text_async_iter()])
        assert await state.get("a") == "xyz"
        await state.ready()
        return pairs, text

    pairs, text = asyncio.run(read())
    assert "".join(piece for piece, _ in pairs) == "xyz"
    counts = [meta["pieces"] for _, meta in pairs]
    assert counts[-1] == 3
    assert all(a < b for a, b in pairwise(counts))
    assert text == "Qxyz-xyz."


def test_meta_data_is_that_of_a_variable() -> None:
    state = program.run(backend=ScriptedBackend(), stream=True)

    async def read() -> None:
        async for _ in state.text_async_iter(return_meta_data=True):
            raise AssertionError

    with pytest.raises(ValueError, match="give var_name"):
        asyncio.run(read())
    state.sync()


def test_a_program_can_read_pieces_itself() -> None:
    @gapless.function
    def reader(s: ProgramState) -> tuple[str, str]:
        s += "a" + gen("x")
        fork = s.fork(1)[0]
        fork += gen("y")
        return "".join(s.text_iter("x")), "".join(fork.text_iter())

    backend = ScriptedBackend()
    for stream in (False, True):
        assert reader.run(backend=backend, stream=stream).ret_value == ("<1>", "a<1><4>")


@pytest.mark.parametrize("name", [None, "a", "b", "never"])
def test_iterating_after_an_error_raises_it(name: str | None) -> None:
    state = program.run(backend=ScriptedBackend(refuse), stream=True)
    for _ in range(2):
        with pytest.raises(ProgramError, match="the model is gone"):
            for piece in state.text_iter(name):
                assert piece == "Q"
        with pytest.raises(ProgramError, match="the model is gone"):
            asyncio.run(anext(state.text_async_iter(name or "a")))  # type: ignore[arg-type]


def test_a_name_that_may_still_come_is_waited_for() -> None:
    backend = ScriptedBackend(held=True)

    @gapless.function
    def late(s: ProgramState) -> None:
        s += gen("first")
        s["first"]
        s += gen("second")

    state = late.run(backend=backend, stream=True)

    async def read() -> str:
        reading = asyncio.create_task(state.get("second"))
        await asyncio.sleep(0)
        backend.let_go()
        return str(await reading)

    assert backend.called.wait(30)
    assert asyncio.run(read()) == "<3>"
