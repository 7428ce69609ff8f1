"""Grammars are checked once, in a process that may die or hang without harm to anything else."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from gapless.runtime.core.errors import InternalError, RequestError, UnavailableError
from gapless.runtime.core.messages import Submit
from gapless.runtime.core.sampling import SamplingParams
from gapless.tokenizer_manager import grammar as module
from gapless.tokenizer_manager.grammar import Grammars
from gapless.tokenizer_manager.schema import Prompt

Run = Callable[[Any], None]


def prompt(**params: Any) -> Prompt:
    return Prompt("a", None, SamplingParams.parse(params), "r", ("r",))


@asynccontextmanager
async def checker(timeout: float = 20.0) -> AsyncIterator[Grammars]:
    grammars = Grammars(timeout)
    try:
        yield grammars
    finally:
        grammars.close()


def pid(grammars: Grammars) -> int:
    process = grammars._worker._process
    assert process is not None
    return process.pid


def test_no_process_is_started_for_requests_without_a_grammar(run: Run) -> None:
    async def test() -> None:
        async with checker() as grammars:
            assert await grammars.lark(prompt()) == ""
            assert grammars._worker._process is None

    run(test())


def test_the_same_grammar_is_checked_once(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        async with checker() as grammars:
            asked: list[str] = []
            check = grammars._worker.check
            monkeypatch.setattr(grammars._worker, "check", lambda g: (asked.append(g.text), check(g))[1])
            texts = await asyncio.gather(*(grammars.lark(prompt(regex="a+")) for _ in range(20)))
            assert len(set(texts)) == 1
            for _ in range(2):
                with pytest.raises(RequestError, match="unclosed"):
                    await grammars.lark(prompt(regex="["))
            await grammars.lark(prompt(ebnf='start: "a"'))
            await grammars.lark(prompt(regex="a+"))
            assert asked == ["a+", "[", 'start: "a"']

    run(test())


def test_verdicts_are_bounded_in_number_and_size(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        monkeypatch.setattr(module, "MAX_REMEMBERED", 3)
        monkeypatch.setattr(module, "MAX_REMEMBERED_CHARS", 2000)
        async with checker() as grammars:
            for i in range(6):
                await grammars.lark(prompt(regex=f"a{i}"))
            assert [text for _, text in grammars._verdicts] == ["a3", "a4", "a5"]
            await grammars.lark(prompt(regex="a3"))
            await grammars.lark(prompt(regex="b" * 700))
            assert [text for _, text in grammars._verdicts] == ["a5", "a3", "b" * 700]
            await grammars.lark(prompt(regex="c" * 800))
            assert [text for _, text in grammars._verdicts] == ["c" * 800]
            await grammars.lark(prompt(regex="d" * 2000))
            assert not grammars._verdicts
            assert grammars._chars == 0

    run(test())


def test_what_takes_too_long_is_refused_and_others_are_checked_afterwards(run: Run) -> None:
    """The process is stopped, so that it answers nothing in time."""

    async def test() -> None:
        async with checker(timeout=0.5) as grammars:
            await grammars.lark(prompt(regex="a"))
            first = pid(grammars)
            os.kill(first, signal.SIGSTOP)
            with pytest.raises(RequestError) as caught:
                await grammars.lark(prompt(regex="b"))
            assert caught.value.param == "sampling_params.regex"
            assert "longer than 0.5 s (--grammar-timeout)" in caught.value.message
            assert await grammars.lark(prompt(regex="c"))
            assert pid(grammars) != first
            with pytest.raises(ProcessLookupError):
                os.kill(first, 0)

    run(test())


def test_what_kills_the_process_is_refused_and_others_are_checked_afterwards(run: Run) -> None:
    async def test() -> None:
        async with checker() as grammars:
            await grammars.lark(prompt(regex="a"))
            os.kill(pid(grammars), signal.SIGSTOP)
            asking = asyncio.create_task(grammars.lark(prompt(regex="b")))
            while not grammars._running:
                await asyncio.sleep(0)
            os.kill(pid(grammars), signal.SIGKILL)
            try:
                await asking
            except RequestError as error:
                assert "broke the compiler" in error.message
            # It may also have been dead before it was asked: then another was started for this one.
            assert await grammars.lark(prompt(regex="c"))

    run(test())


def test_a_caller_that_goes_leaves_the_answer_to_others(run: Run) -> None:
    async def test() -> None:
        async with checker() as grammars:
            going = asyncio.create_task(grammars.lark(prompt(regex="a+")))
            while not grammars._running:
                await asyncio.sleep(0)
            staying = asyncio.create_task(grammars.lark(prompt(regex="a+")))
            await asyncio.sleep(0)
            going.cancel()
            assert await staying
            assert going.cancelled()

    run(test())


def test_closing_ends_the_process_and_what_waits_for_it(run: Run) -> None:
    async def test() -> None:
        async with checker() as grammars:
            await grammars.lark(prompt(regex="a"))
            number = pid(grammars)
            os.kill(number, signal.SIGSTOP)
            asking = asyncio.create_task(grammars.lark(prompt(regex="b")))
            while not grammars._running:
                await asyncio.sleep(0)
            grammars.close()
            with pytest.raises(UnavailableError):
                await asking
            with pytest.raises(UnavailableError):
                await grammars.lark(prompt(regex="c"))
            with pytest.raises(ProcessLookupError):
                os.kill(number, 0)

    run(test())


def test_a_process_that_cannot_start_is_the_servers_fault(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        monkeypatch.setattr(module, "_MODULE", "gapless.no_such_module")
        async with checker() as grammars:
            with pytest.raises(InternalError, match="does not start"):
                await grammars.lark(prompt(regex="a"))

    run(test())


def test_a_grammar_reaches_the_scheduler_in_lark_and_a_bad_one_never_does(run: Run, in_process: Any) -> None:
    async def test() -> None:
        async with in_process() as service:
            params = [{"regex": "ab", "n": 2}, {}]
            assert (await service.generate(text=["a", "b"], sampling_params=params)).status_code == 200
            sent = [message for message in service.engine.sent if isinstance(message, Submit)]
            assert [bool(message.grammar) for message in sent] == [True, True, False]
            assert {message.params.grammar for message in sent} == {None}
            service.engine.sent.clear()
            response = await service.generate(text=["a", "b"], sampling_params=[{}, {"json_schema": "{"}])
            assert response.status_code == 400
            assert response.json()["error"]["param"] == "sampling_params[1].json_schema"
            assert service.engine.sent == []
            assert len(service.front.registry) == 0

    run(test())


def test_without_a_backend_grammars_are_refused(run: Run, in_process: Any) -> None:
    async def test() -> None:
        async with in_process(grammar_backend="none") as service:
            response = await service.generate(text="a", sampling_params={"regex": "a"})
            assert response.status_code == 400
            assert "--grammar-backend" in response.json()["error"]["message"]

    run(test())
