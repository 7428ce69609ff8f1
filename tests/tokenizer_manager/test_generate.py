"""POST /generate: the shape of answers, streams and errors."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from gapless.runtime.core.messages import Fatal, Finish, Submit, int32s

OUT_OF_ROOM = {"finish": Finish.FAILED, "message": "no room", "code": "capacity"}


def test_one_prompt_gives_an_object(run: Any, in_process: Any) -> None:
    async def test() -> None:
        async with in_process() as service:
            response = await service.generate(text="abc", rid="mine", sampling_params={"max_new_tokens": 2})
            body = response.json()
            assert (response.status_code, body["text"], body["output_ids"]) == (200, "ab", list(b"ab"))
            assert body["meta_info"].pop("e2e_latency") >= 0
            assert body["meta_info"] == {
                "id": "mine", "finish_reason": {"type": "length", "length": 2},
                "prompt_tokens": 3, "completion_tokens": 2, "cached_tokens": 1,
            }  # fmt: skip
            assert len(service.front.registry) == 0

    run(test())


def test_a_batch_gives_a_list_in_order(run: Any, in_process: Any) -> None:
    async def test() -> None:
        async with in_process(echo=False) as service:
            task = asyncio.create_task(service.generate(text=["a", "b", "c"]))
            uids = [(await service.engine.take(Submit)).uid for _ in range(3)]
            for uid, text in zip(reversed(uids), "cba", strict=True):
                service.engine.gain(uid, text, [ord(text)], Finish.LENGTH)
            assert [answer["text"] for answer in (await task).json()] == ["a", "b", "c"]

    run(test())


def test_no_new_tokens_gives_an_empty_text(run: Any, in_process: Any) -> None:
    async def test() -> None:
        async with in_process() as service:
            response = await service.generate(text="abc", sampling_params={"max_new_tokens": 0})
            assert (response.status_code, response.json()["text"]) == (200, "")

    run(test())


@pytest.mark.parametrize(
    ("finish", "matched", "reason"),
    [
        (Finish.STOP_TOKEN, 256, {"type": "stop", "matched": 256}),
        (Finish.STOP_STRING, "END", {"type": "stop", "matched": "END"}),
        (Finish.LENGTH, None, {"type": "length", "length": 1}),
        (Finish.ABORT, None, {"type": "abort", "message": "aborted"}),
    ],
)
def test_finish_reasons(
    run: Any, in_process: Any, finish: Finish, matched: int | str | None, reason: dict[str, Any]
) -> None:
    async def test() -> None:
        async with in_process(echo=False) as service:
            task, submit = await service.start(text="a")
            service.engine.gain(submit.uid, "x", [120], finish, matched)
            assert (await task).json()["meta_info"]["finish_reason"] == reason

    run(test())


def test_a_long_text_is_tokenized_in_a_thread(run: Any, in_process: Any) -> None:
    """The prompt does not fit: what is tested is that its error comes back from there."""

    async def test() -> None:
        async with in_process() as service:
            ready = msgspec.structs.replace(service.front.ready, context_length=5000, max_prompt_tokens=5000)
            service.front.handle(ready)
            response = await service.generate(text="x" * 10_000)
            assert response.status_code == 400
            assert "10000 tokens" in response.json()["error"]["message"]
            assert len(service.front.registry) == 0

    run(test())


@pytest.mark.parametrize("incremental", [False, True])
def test_a_stream_is_cumulative_unless_increments_are_asked_for(
    run: Any, on_a_socket: Any, incremental: bool
) -> None:
    async def test() -> None:
        async with on_a_socket(incremental_streaming_output=incremental) as service:
            stream = service.stream(text="abc", rid="r")
            uid = (await service.engine.take(Submit)).uid
            got = []
            for text, ids, finish in [("x", [1], 0), ("", [2], 0), ("yz", [3], Finish.LENGTH)]:
                service.engine.gain(uid, text, ids, finish)
                got.append(await stream.next())
            assert [await stream.next(), await stream.next()] == ["[DONE]", None]
            assert stream.response.headers["content-type"].startswith("text/event-stream")
            assert [(e["text"], e["output_ids"]) for e in got] == (
                [("x", [1]), ("", [2]), ("yz", [3])]
                if incremental
                else [("x", [1]), ("x", [1, 2]), ("xyz", [1, 2, 3])]
            )
            metas = [e["meta_info"] for e in got]
            assert [m["finish_reason"] for m in metas] == [None, None, {"type": "length", "length": 1}]
            assert [m["completion_tokens"] for m in metas] == [1, 2, 3]
            assert [m["prompt_tokens"] for m in metas] == [3, 3, 3]

    run(test())


def test_updates_that_come_between_two_reads_make_one_event(run: Any, on_a_socket: Any) -> None:
    async def test() -> None:
        async with on_a_socket() as service:
            stream = service.stream(text="abc")
            uid = (await service.engine.take(Submit)).uid
            for i in range(100):
                service.engine.gain(uid, "x", [i])
            event = await stream.next()
            assert (event["text"], event["output_ids"]) == ("x" * 100, list(range(100)))
            service.engine.gain(uid, finish=Finish.LENGTH)
            assert (await stream.next())["text"] == "x" * 100
            await stream.close()

    run(test())


def test_stream_interval(run: Any, on_a_socket: Any) -> None:
    """The first id comes at once, then four at least between two events, and the last as it comes."""

    async def test() -> None:
        async with on_a_socket(stream_interval=4) as service:
            stream = service.stream(text="abc")
            uid = (await service.engine.take(Submit)).uid
            service.engine.gain(uid, "x", [0])
            assert (await stream.next())["output_ids"] == [0]
            state = service.front.registry._live[uid]
            for i in (1, 2, 3):
                service.engine.gain(uid, "x", [i])
                assert not state.call._event.is_set()
            service.engine.gain(uid, "x", [4])
            assert (await stream.next())["output_ids"] == [0, 1, 2, 3, 4]
            service.engine.gain(uid, "x", [5], Finish.LENGTH)
            assert len((await stream.next())["output_ids"]) == 6
            await stream.close()

    run(test())


def test_the_events_of_a_batch_carry_their_index(run: Any, on_a_socket: Any) -> None:
    async def test() -> None:
        async with on_a_socket() as service:
            stream = service.stream(text=["a", "b"])
            uids = [(await service.engine.take(Submit)).uid for _ in range(2)]
            service.engine.gain(uids[1], "x", [1], Finish.LENGTH)
            first = await stream.next()
            service.engine.gain(uids[0], "y", [2], Finish.LENGTH)
            second = await stream.next()
            assert [(e["index"], e["text"]) for e in (first, second)] == [(1, "x"), (0, "y")]
            assert await stream.next() == "[DONE]"
            await stream.close()

    run(test())


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("end", "status", "code"),
    [
        (OUT_OF_ROOM, 503, "capacity"),
        ({"finish": Finish.FAILED, "message": "bad row", "code": "unheard of"}, 500, "internal_error"),
    ],
)
def test_a_failure_before_any_output_is_a_real_status(
    run: Any, on_a_socket: Any, stream: bool, end: dict[str, Any], status: int, code: str
) -> None:
    async def test() -> None:
        async with on_a_socket() as service:
            task, submit = await service.start(text="abc", stream=stream)
            service.engine.gain(submit.uid, **end)
            response = await task
            assert (response.status_code, response.json()["error"]["code"]) == (status, code)
            assert service.engine.aborts() == []

    run(test())


def test_a_failure_after_output_is_an_event_and_the_end(run: Any, on_a_socket: Any) -> None:
    async def test() -> None:
        async with on_a_socket() as service:
            stream = service.stream(text="abc")
            uid = (await service.engine.take(Submit)).uid
            service.engine.gain(uid, "x", [1])
            await stream.next()
            service.engine.gain(uid, **OUT_OF_ROOM)
            event = await stream.next()
            assert (event["error"]["code"], event["error"]["message"]) == ("capacity", "no room")
            assert [await stream.next(), await stream.next()] == ["[DONE]", None]

    run(test())


def test_a_failed_prompt_fails_its_batch_and_aborts_the_rest(run: Any, in_process: Any) -> None:
    async def test() -> None:
        async with in_process(echo=False) as service:
            task = asyncio.create_task(service.generate(text=["a", "b", "c"]))
            uids = [(await service.engine.take(Submit)).uid for _ in range(3)]
            service.engine.gain(uids[0], "x", [1], Finish.LENGTH)
            service.engine.gain(uids[1], **OUT_OF_ROOM)
            assert (await task).status_code == 503
            assert service.engine.aborts() == [uids[2]]

    run(test())


def test_in_a_streamed_batch_the_others_go_on(run: Any, on_a_socket: Any) -> None:
    async def test() -> None:
        async with on_a_socket() as service:
            stream = service.stream(text=["a", "b"])
            uids = [(await service.engine.take(Submit)).uid for _ in range(2)]
            service.engine.gain(uids[0], "x", [1])
            await stream.next()
            service.engine.gain(uids[1], **OUT_OF_ROOM)
            event = await stream.next()
            assert (event["index"], event["error"]["code"]) == (1, "capacity")
            service.engine.gain(uids[0], "y", [2], Finish.LENGTH)
            assert (await stream.next())["text"] == "xy"
            assert await stream.next() == "[DONE]"
            await stream.close()

    run(test())


def test_the_end_of_the_engine_ends_every_request(run: Any, on_a_socket: Any) -> None:
    async def test() -> None:
        async with on_a_socket() as service:
            stream = service.stream(text="abc")
            uid = (await service.engine.take(Submit)).uid
            service.engine.gain(uid, "x", [1])
            await stream.next()
            task, _ = await service.start(text="abc")
            service.front.handle(Fatal("the device hung"))
            assert "the device hung" in (await stream.next())["error"]["message"]
            assert [await stream.next(), await stream.next()] == ["[DONE]", None]
            assert (await task).status_code == 500
            assert (await service.generate(text="abc")).status_code == 503
            assert len(service.front.registry) == 0
            service.engine.gain(uid, "late", [2], Finish.LENGTH)  # dropped

    run(test())


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input_ids": [1, 999999]}, "input_ids[1]"),
        ({"input_ids": [-1]}, "input_ids[0]"),
        ({"input_ids": [1.5]}, "input_ids[0]"),
        ({"input_ids": ["a"]}, "input_ids[0]"),
        ({"input_ids": []}, "input_ids"),
        ({"input_ids": [2**63]}, "input_ids[0]"),
        ({"input_ids": [[1], [2, 3, 5, 700]]}, "input_ids[1][3]"),
        ({"text": "x" * 64}, "text"),
        ({"text": ["a", "x" * 64]}, "text[1]"),
        ({"text": ""}, "text"),
        ({"text": "a", "sampling_params": {"top_p": 0}}, "sampling_params.top_p"),
        ({"text": "a", "sampling_params": {"stop_token_ids": [600]}}, "sampling_params.stop_token_ids[0]"),
        *(
            ({"text": "a", "sampling_params": {name: value}}, f"sampling_params.{name}")
            for name, value in (
                ("min_new_tokens", -1),
                ("min_new_tokens", 129),
                ("min_new_tokens", 1.5),
                ("frequency_penalty", 2.5),
                ("frequency_penalty", "1"),
                ("presence_penalty", -2.5),
                ("presence_penalty", True),
                ("repetition_penalty", 0),
                ("repetition_penalty", [1.1]),
                ("logit_bias", [5, 1]),
                ("logit_bias", {"x": 1}),
                ("logit_bias", {"5": 101}),
                ("logit_bias", {"5": None}),
                ("n", 0),
                ("n", 2**63 - 1),
                ("regex", 5),
                ("json_schema", []),
                ("ebnf", "x" * 200_000),
                ("structural_tag", "{}"),
            )
        ),
        (
            {"text": "a", "sampling_params": {"logit_bias": {"1": 1, "600": 1}}},
            "sampling_params.logit_bias[600]",
        ),
        (
            {"text": ["a"], "sampling_params": [{"logit_bias": {"600": 1}}]},
            "sampling_params[0].logit_bias[600]",
        ),
    ],
)
def test_a_bad_value_is_400_before_any_work(
    run: Any, in_process: Any, body: dict[str, Any], param: str, stream: bool
) -> None:
    async def test() -> None:
        async with in_process() as service:
            response = await service.generate(**body, stream=stream)
            assert (response.status_code, response.json()["error"]["param"]) == (400, param)
            assert (service.engine.sent, len(service.front.registry)) == ([], 0)
            assert (await service.generate(text="ok")).status_code == 200

    run(test())


def test_a_non_finite_number_gets_valid_json_back(run: Any, in_process: Any) -> None:
    async def test() -> None:
        async with in_process() as service:
            for number in (b"NaN", b"Infinity", b"-Infinity", b"1e400"):
                body = b'{"text":"a","sampling_params":{"temperature":' + number + b"}}"
                response = await service.client.post("/generate", content=body)
                assert (response.status_code, response.json()["error"]["code"]) == (400, "invalid_value")

    run(test())


def test_a_live_request_id_is_refused(run: Any, in_process: Any) -> None:
    async def test() -> None:
        async with in_process(echo=False) as service:
            task, submit = await service.start(text="a", rid="x")
            for second in ({"text": "b", "rid": "x"}, {"text": ["b", "c"], "rid": ["y", "x"]}):
                response = await service.generate(**second)
                assert (response.status_code, response.json()["error"]["param"]) == (409, "rid")
            assert (await service.generate(text=["b", "c"], rid=["y", "y"])).status_code == 409
            service.engine.gain(submit.uid, "x", [1], Finish.LENGTH)
            assert (await task).status_code == 200
            again, submit = await service.start(text="a", rid="x")
            service.engine.gain(submit.uid, "x", [1], Finish.LENGTH)
            assert (await again).status_code == 200

    run(test())


def test_more_requests_than_may_wait_get_503(run: Any, in_process: Any) -> None:
    async def test() -> None:
        async with in_process(echo=False, max_queued_requests=2) as service:
            task, submit = await service.start(text="a")
            response = await service.generate(text=["b", "c"])
            assert (response.status_code, response.headers["retry-after"]) == (503, "1")
            service.engine.gain(submit.uid, "x", [1], Finish.LENGTH)
            assert (await task).status_code == 200

    run(test())


def test_a_seed_makes_requests_repeatable(run: Any, in_process: Any) -> None:
    async def seeds(random_seed: int) -> list[int]:
        async with in_process(random_seed=random_seed) as service:
            await service.generate(text=["a", "b"])
            return [m.seed for m in service.engine.sent]

    async def test() -> None:
        assert await seeds(5) == await seeds(5)
        assert await seeds(5) != await seeds(6)
        first, second = await seeds(5)
        assert first != second

    run(test())


def test_ids_reach_the_engine_as_given(run: Any, in_process: Any) -> None:
    async def test() -> None:
        async with in_process() as service:
            await service.generate(input_ids=[3, 1, 2], extra_key="tenant")
            (submit,) = service.engine.sent
            assert (int32s(submit.input_ids).tolist(), submit.extra_key) == ([3, 1, 2], "tenant")

    run(test())


def test_a_hopeless_text_is_refused_before_it_is_tokenized(run: Any, in_process: Any) -> None:
    """Megabytes of text for a short context: tokenizing them would keep everybody's prompts waiting for seconds."""

    async def test() -> None:
        async with in_process() as service:
            service.front.tokenizer.encode = None
            response = await service.generate(text=["a", "b" * 1_000_000])
            error = response.json()["error"]
            assert (response.status_code, error["param"]) == (400, "text[1]")
            assert "1000000 characters" in error["message"]
            assert "context length 64" in error["message"]
            assert len(service.front.registry) == 0

    run(test())
