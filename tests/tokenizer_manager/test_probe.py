"""GET /health_generate: what it sends, and its verdict, which comes in bounded time."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from gapless.runtime.core.messages import Abort, Fatal, Finish, Submit, int32s
from gapless.tokenizer_manager import probe


def start(service: Any) -> asyncio.Task[Any]:
    return asyncio.create_task(service.client.get("/health_generate"))


def test_one_token_through_the_engine(run: Any, on_a_socket: Any) -> None:
    """In a namespace of its own, so that it is never found by another prompt; with room beyond a full queue."""

    async def test() -> None:
        async with on_a_socket(max_queued_requests=1) as service:
            busy, other = await service.start(text="a")
            task = start(service)
            submit = await service.engine.take(Submit)
            assert (len(int32s(submit.input_ids)), submit.params.max_new_tokens) == (1, 1)
            assert submit.cache_salt
            service.engine.gain(submit.uid, "x", [1], Finish.LENGTH)
            response = await task
            assert (response.status_code, response.json()) == (200, {"status": "ok"})
            task = start(service)
            again = await service.engine.take(Submit)
            assert again.cache_salt == submit.cache_salt, "each would leave a page"
            service.engine.gain(again.uid, "x", [1], Finish.LENGTH)
            service.engine.gain(other.uid, "x", [1], Finish.LENGTH)
            assert {(await task).status_code, (await busy).status_code} == {200}

    run(test())


def test_probes_share_one_request(run: Any, in_process: Any) -> None:
    """Also when the first of those who asked has gone; the next probe after the answer makes another."""

    async def test() -> None:
        async with in_process(echo=False) as service:
            route = probe._Probe(service.front)
            for turn in range(2):
                first, *others = (asyncio.create_task(route.health_generate(None)) for _ in range(5))
                submit = await service.engine.take(Submit)
                first.cancel()
                service.engine.gain(submit.uid, "x", [1], Finish.LENGTH)
                assert {(await task).status_code for task in others} == {200}
                assert len(service.engine.sent) == turn + 1

    run(test())


def test_no_token_is_503_in_time(run: Any, on_a_socket: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "PROBE_SECONDS", 0.05)

    async def test() -> None:
        async with on_a_socket() as service:
            task = start(service)
            submit = await service.engine.take(Submit)
            assert (await service.engine.take(Abort)).uid == submit.uid
            service.engine.gain(submit.uid, finish=Finish.ABORT)
            response = await task
            assert (response.status_code, response.headers["retry-after"]) == (503, "1")
            assert "no token" in response.json()["error"]["message"]

    run(test())


def test_a_long_queue_is_not_illness(run: Any, on_a_socket: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The probe waits behind others, who get their tokens meanwhile."""
    monkeypatch.setattr(probe, "PROBE_SECONDS", 0.05)

    async def test() -> None:
        async with on_a_socket() as service:
            busy, other = await service.start(text="a")
            task = start(service)
            submit = await service.engine.take(Submit)
            service.engine.gain(other.uid, "x", [1], Finish.LENGTH)
            await service.engine.take(Abort)
            service.engine.gain(submit.uid, finish=Finish.ABORT)
            assert {(await task).status_code, (await busy).status_code} == {200}

    run(test())


@pytest.mark.parametrize("how", ["stalled", "dead", "failed"])
def test_an_engine_that_goes_while_it_waits(
    run: Any, on_a_socket: Any, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    monkeypatch.setattr(probe, "_CHECK_SECONDS", 0.01)

    async def test() -> None:
        async with on_a_socket() as service:
            task = start(service)
            submit = await service.engine.take(Submit)
            if how == "stalled":
                service.engine.now = 5.0
            elif how == "dead":
                service.front.handle(Fatal("the device hung"))
            else:
                service.engine.gain(submit.uid, finish=Finish.FAILED, message="no", code="capacity")
            assert (await task).status_code in (500, 503)
            if how == "dead":
                assert (await start(service)).status_code == 503
            if how == "stalled":
                assert (await start(service)).status_code == 503
                service.engine.gain(submit.uid, "x", [1], Finish.LENGTH)

    run(test())


def test_while_loading_it_is_503(run: Any, in_process: Any) -> None:
    async def test() -> None:
        async with in_process(loaded=False) as service:
            assert (await service.client.get("/health_generate")).status_code == 503

    run(test())
