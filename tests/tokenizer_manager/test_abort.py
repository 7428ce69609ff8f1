"""POST /abort_request and a request's own timeout: whom they reach, and what the ended request answers."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from gapless.runtime.core.messages import Abort, Finish, Submit
from gapless.tokenizer_manager import states
from gapless.tokenizer_manager.front import Front


async def abort(service: Any, **body: Any) -> int:
    response = await service.client.post("/abort_request", json=body)
    assert response.status_code == 200
    return int(response.json()["aborted"])


@pytest.mark.parametrize("stream", [False, True])
def test_an_aborted_request_answers_with_what_it_has(run: Any, on_a_socket: Any, stream: bool) -> None:
    """SGLang's form: status 200, finish_reason abort, also where there is no output yet."""

    async def test() -> None:
        async with on_a_socket() as service:
            for ids in ([1, 2], []):
                task, submit = await service.start(text="a", rid="mine", stream=stream)
                if ids:
                    service.engine.gain(submit.uid, "xy", ids)
                assert await abort(service, rid="mine") == 1
                assert (await service.engine.take(Abort)).uid == submit.uid
                assert await abort(service, rid="mine") == 0, "it is on its way out"
                service.engine.gain(submit.uid, finish=Finish.ABORT)
                response = await task
                assert response.status_code == 200
                text = response.text.split("\n\n")[-3].removeprefix("data: ") if stream else response.text
                assert f'"text":"{"xy" if ids else ""}"' in text
                assert '"finish_reason":{"type":"abort","message":"aborted by request"}' in text
            assert len(service.engine.aborts()) == 2
            assert len(service.front.registry) == 0

    run(test())


def test_it_reaches_exactly_those_of_the_id(run: Any, on_a_socket: Any) -> None:
    """No prefix: not `ab` for `a`. All samples of a prompt and all of a batch by the id given, one by its own."""

    async def test() -> None:
        async with on_a_socket() as service:
            uids, tasks = {}, []
            for rid, body in {
                "a": {"text": "x"},
                "ab": {"text": "x"},
                "n": {"text": "x", "sampling_params": {"n": 3}},
                "batch": {"text": ["x", "y"]},
            }.items():
                tasks.append(asyncio.create_task(service.generate(rid=rid, **body)))
                count = {"n": 3, "batch": 2}.get(rid, 1)
                uids[rid] = [(await service.engine.take(Submit)).uid for _ in range(count)]
            for rid, want in [
                ("a", uids["a"]),
                ("n_1", uids["n"][1:2]),
                ("n", [uids["n"][0], uids["n"][2]]),
                ("batch_0", uids["batch"][:1]),
                ("batch", uids["batch"][1:]),
                ("b", []),
                ("n_", []),
            ]:
                before = len(service.engine.aborts())
                assert await abort(service, rid=rid) == len(want)
                assert service.engine.aborts()[before:] == want
            before = len(service.engine.aborts())
            assert await abort(service, abort_all=True, rid="") == 1
            assert service.engine.aborts()[before:] == uids["ab"]
            for uid in [uid for of_rid in uids.values() for uid in of_rid]:
                service.engine.gain(uid, finish=Finish.ABORT)
            for task in tasks:
                answers = (await task).json()
                for answer in answers if isinstance(answers, list) else [answers]:
                    assert answer["meta_info"]["finish_reason"]["type"] == "abort"

    run(test())


def test_one_that_the_engine_does_not_have_yet_ends_at_once(run: Any, on_a_socket: Any) -> None:
    """Its prompt is being tokenized: nothing of it reaches the engine."""

    async def test() -> None:
        async with on_a_socket() as service:
            started, go_on = asyncio.Event(), asyncio.Event()

            async def submit(call: Any, prompts: Any) -> None:
                started.set()
                await go_on.wait()
                await Front.submit(service.front, call, prompts)

            service.front.submit = submit
            task = asyncio.create_task(service.generate(text="a", rid="mine"))
            await started.wait()
            assert await abort(service, rid="mine") == 1
            go_on.set()
            response = await task
            assert response.json()["meta_info"]["finish_reason"]["type"] == "abort"
            assert service.engine.sent == []

    run(test())


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "rid"),
        ({"rid": 5}, "rid"),
        ({"rid": ""}, "rid"),
        ({"rid": "x" * 257}, "rid"),
        ({"abort_all": 1}, "abort_all"),
    ],
)
def test_a_wrong_body_is_400(run: Any, in_process: Any, body: dict[str, Any], param: str) -> None:
    async def test() -> None:
        async with in_process() as service:
            response = await service.client.post("/abort_request", json=body)
            assert (response.status_code, response.json()["error"]["param"]) == (400, param)

    run(test())


def test_a_timeout_without_output_is_408(run: Any, on_a_socket: Any) -> None:
    async def test() -> None:
        async with on_a_socket() as service:
            task, submit = await service.start(text="a", timeout=0.01)
            assert (await service.engine.take(Abort)).uid == submit.uid
            service.engine.gain(submit.uid, finish=Finish.ABORT)
            response = await task
            assert response.status_code == 408
            error = response.json()["error"]
            assert (error["code"], error["param"]) == ("timeout", "timeout")
            assert "0.01 s" in error["message"]

    run(test())


def test_an_abort_before_the_timeout_stays_an_abort(run: Any, on_a_socket: Any) -> None:
    async def test() -> None:
        async with on_a_socket() as service:
            task, submit = await service.start(text="a", rid="mine", timeout=30)
            assert await abort(service, rid="mine") == 1
            (state,) = service.front.registry._live.values()
            service.front.registry._expire(state.call, 30)
            service.engine.gain(submit.uid, finish=Finish.ABORT)
            response = await task
            assert response.json()["meta_info"]["finish_reason"]["message"] == "aborted by request"
            assert service.engine.aborts() == [submit.uid]

    run(test())


@pytest.mark.parametrize("stream", [False, True])
def test_a_timeout_keeps_what_came_before(run: Any, on_a_socket: Any, stream: bool) -> None:
    async def test() -> None:
        async with on_a_socket() as service:
            task, submit = await service.start(text="a", timeout=0.2, stream=stream)
            service.engine.gain(submit.uid, "xy", [1, 2])
            await service.engine.take(Abort)
            service.engine.gain(submit.uid, finish=Finish.ABORT)
            response = await task
            assert response.status_code == 200
            assert '"text":"xy"' in response.text
            assert "timeout of 0.2 s is over" in response.text

    run(test())


def test_a_request_that_ends_in_time_has_no_timeout(run: Any, on_a_socket: Any) -> None:
    async def test() -> None:
        async with on_a_socket() as service:
            task, submit = await service.start(text="a", timeout=30)
            (state,) = service.front.registry._live.values()
            service.engine.gain(submit.uid, "x", [1], Finish.LENGTH)
            assert (await task).status_code == 200
            assert state.call.timer.cancelled()
            assert service.engine.aborts() == []

    run(test())


def test_a_timeout_ends_a_request_that_the_engine_does_not_end(
    run: Any, on_a_socket: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hung engine does not keep its clients; what it says of them later is dropped."""
    monkeypatch.setattr(states, "LATE_END_SECONDS", 0.01)

    async def test() -> None:
        async with on_a_socket() as service:
            task, submit = await service.start(text="a", rid="mine", timeout=0.01)
            assert (await task).status_code == 408
            assert len(service.front.registry) == 0
            service.engine.gain(submit.uid, "x", [1], Finish.LENGTH)
            assert service.engine.aborts() == [submit.uid]

    run(test())


@pytest.mark.parametrize("value", [0, -1, "5", True, [1.0], 1e7])
def test_a_wrong_timeout_is_400(run: Any, in_process: Any, value: Any) -> None:
    async def test() -> None:
        async with in_process() as service:
            response = await service.generate(text="a", timeout=value)
            assert (response.status_code, response.json()["error"]["param"]) == (400, "timeout")

    run(test())
