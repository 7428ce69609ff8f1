"""/flush_cache: done, refused with the reason, or waited for; whatever else goes on, there is an answer."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from gapless.runtime.core.messages import Abort, Fatal, Finish, Flush, Flushed
from gapless.tokenizer_manager import flush


@pytest.mark.parametrize("method", ["GET", "POST"])
def test_a_flush_at_rest(run: Any, in_process: Any, method: str) -> None:
    async def test() -> None:
        async with in_process() as service:
            task = asyncio.create_task(service.client.request(method, "/flush_cache"))
            await service.engine.answer_flush(pages=7)
            response = await task
            assert response.status_code == 200
            assert response.json() == {
                "success": True, "message": "the cache was flushed: 7 pages were freed", "pages": 7,
            }  # fmt: skip

    run(test())


def test_a_flush_while_requests_run_is_refused_with_their_counts(run: Any, in_process: Any) -> None:
    async def test() -> None:
        async with in_process(echo=False) as service:
            answer, submit = await service.start(text="a")
            refused = service.flush()
            await service.engine.answer_flush(running=1, waiting=2)
            error = (await refused).json()["error"]
            assert ((await refused).status_code, error["code"]) == (409, "busy")
            assert "(running requests: 1, waiting: 2)" in error["message"]
            service.engine.gain(submit.uid, "x", [1], Finish.LENGTH)
            assert (await answer).status_code == 200

    run(test())


def test_a_flush_right_after_the_last_answer_waits_for_the_steps_in_flight(run: Any, in_process: Any) -> None:
    async def test() -> None:
        async with in_process(echo=False) as service:
            answer, submit = await service.start(text="a")
            service.engine.gain(submit.uid, "x", [1], Finish.LENGTH)
            assert (await answer).status_code == 200
            flushed = service.flush()
            for _ in range(3):
                await service.engine.answer_flush(running=1)
            await service.engine.answer_flush(pages=2)
            assert (await flushed).json()["pages"] == 2

    run(test())


def test_an_engine_that_does_not_come_to_rest(
    run: Any, in_process: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is alive here, yet it says that something runs: an answer after the grace all the same."""
    monkeypatch.setattr(flush, "GRACE_SECONDS", 0.0)

    async def test() -> None:
        async with in_process() as service:
            refused = service.flush()
            await service.engine.answer_flush(running=1)
            assert (await refused).status_code == 409

    run(test())


def test_a_timeout_waits_for_the_last_request_and_asks_then(run: Any, in_process: Any) -> None:
    async def test() -> None:
        async with in_process(echo=False) as service:
            answers = [await service.start(text=text) for text in "ab"]
            flushed = service.flush(timeout=600)
            await service.engine.answer_flush(running=2)
            for task, submit in answers:
                assert not any(isinstance(m, Flush) for m in service.engine.sent[3:])
                service.engine.gain(submit.uid, "x", [1], Finish.LENGTH)
                assert (await task).status_code == 200
            await service.engine.answer_flush(running=1)
            await service.engine.answer_flush(pages=3)
            assert (await flushed).json()["pages"] == 3

    run(test())


def test_a_timeout_that_is_over_gives_the_newest_counts(run: Any, in_process: Any) -> None:
    async def test() -> None:
        async with in_process(echo=False) as service:
            await service.start(text="a")
            refused = service.flush(timeout=0.05)
            await service.engine.answer_flush(running=1, waiting=5)
            await service.engine.answer_flush(running=1, waiting=4)
            assert "waiting: 4" in (await refused).json()["error"]["message"]

    run(test())


def test_two_flushes_at_once_both_get_their_answer(run: Any, in_process: Any) -> None:
    """Also when the answers come in the other order."""

    async def test() -> None:
        async with in_process() as service:
            tasks = [service.flush(), service.flush()]
            asked = [await service.engine.take(Flush) for _ in tasks]
            for pages, message in enumerate(reversed(asked)):
                service.front.handle(Flushed(message.number, True, pages, 0, 0))
            service.front.handle(Flushed(asked[0].number, True, 9, 0, 0))  # a second answer changes nothing
            service.front.handle(Flushed(12345, True, 9, 0, 0))  # nor one that nobody waits for
            assert [(await task).json()["pages"] for task in tasks] == [1, 0]

    run(test())


def test_a_flush_and_requests_do_not_wait_for_each_other(run: Any, in_process: Any) -> None:
    async def test() -> None:
        async with in_process(echo=False) as service:
            first, one = await service.start(text="a")
            flushed = service.flush(timeout=600)
            await service.engine.answer_flush(running=1)
            second, two = await service.start(text="b")
            for task, submit in ((first, one), (second, two)):
                service.engine.gain(submit.uid, "x", [1], Finish.LENGTH)
                assert (await task).status_code == 200
            await service.engine.answer_flush()
            assert (await flushed).status_code == 200

    run(test())


@pytest.mark.parametrize("timeout", ["-1", "nan", "inf", "x", "3601", "1e999", "9" * 5000])
def test_a_wrong_timeout_is_named(run: Any, in_process: Any, timeout: str) -> None:
    async def test() -> None:
        async with in_process() as service:
            response = await service.flush(timeout=timeout)
            assert (response.status_code, response.json()["error"]["param"]) == (400, "timeout")
            assert service.engine.sent == []

    run(test())


def test_a_flush_that_the_engine_cannot_answer(run: Any, in_process: Any) -> None:
    """Loading, stalled, draining or dead: 503, as for a request."""

    async def test() -> None:
        async with in_process(loaded=False) as service:
            assert (await service.flush()).status_code == 503
        async with in_process() as service:
            service.engine.now = 2.0
            response = await service.flush()
            assert (response.status_code, response.headers["retry-after"]) == (503, "1")
            service.engine.now = 0.0
            service.front.draining = True
            assert (await service.flush()).status_code == 503
            service.front.handle(Fatal("the device hung"))
            assert (await service.flush()).status_code == 503
            assert service.engine.sent == []

    run(test())


@pytest.mark.parametrize("waiting_for", ["the engine", "a request"])
def test_the_end_of_the_engine_ends_a_flush(run: Any, in_process: Any, waiting_for: str) -> None:
    async def test() -> None:
        async with in_process(echo=False) as service:
            answer, _ = await service.start(text="a")
            flushed = service.flush(timeout=600)
            if waiting_for == "a request":
                await service.engine.answer_flush(running=1)
            else:
                await service.engine.take(Flush)
            service.front.handle(Fatal("the device hung"))
            response = await flushed
            assert response.status_code in (500, 503)
            assert "the device hung" in response.json()["error"]["message"]
            assert (await answer).status_code == 500

    run(test())


def test_an_engine_that_stalls_while_a_flush_waits(
    run: Any, in_process: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flush, "_CHECK_SECONDS", 0.01)

    async def test() -> None:
        async with in_process() as service:
            flushed = service.flush()
            await service.engine.take(Flush)
            service.engine.now = 2.0
            assert (await flushed).status_code == 503

    run(test())


def test_a_client_that_goes_flushes_nothing_later(run: Any, on_a_socket: Any) -> None:
    async def test() -> None:
        async with on_a_socket() as service:
            answer, submit = await service.start(text="a")
            flushing = service.flush(timeout=600)
            await service.engine.answer_flush(running=1)
            flushing.cancel()
            with pytest.raises(asyncio.CancelledError):
                await flushing  # its connection is closed before the next one opens
            second = service.flush(timeout=600)
            await service.engine.answer_flush(running=1)
            service.engine.gain(submit.uid, "x", [1], Finish.LENGTH)
            assert (await answer).status_code == 200
            await service.engine.answer_flush(pages=1)
            assert (await second).status_code == 200
            assert len([m for m in service.engine.sent if isinstance(m, Flush)]) == 3
            assert service.engine.aborts() == []

    run(test())


def test_a_flush_while_an_aborted_request_is_on_its_way_out(run: Any, on_a_socket: Any) -> None:
    async def test() -> None:
        async with on_a_socket() as service:
            answer, submit = await service.start(text="a")
            answer.cancel()
            assert (await service.engine.take(Abort)).uid == submit.uid
            flushed = service.flush(timeout=600)
            await service.engine.answer_flush(running=1)
            service.engine.gain(submit.uid, finish=Finish.ABORT)
            await service.engine.answer_flush(pages=1)
            assert (await flushed).status_code == 200

    run(test())
