"""Several samples of one prompt: what reaches the scheduler, the shape of answers, and whom an end reaches."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from gapless.runtime.core.messages import Abort, Finish, Submit
from gapless.runtime.tokenizer.byte_tokenizer import ByteTokenizer
from gapless.tokenizer_manager.prepare import sample_seeds


async def take(service: Any, count: int) -> list[Submit]:
    return [await service.engine.take(Submit) for _ in range(count)]


def end(service: Any, submits: Sequence[Submit]) -> None:
    """The samples end in the reverse of their order, each with a text of its own: its place in that order."""
    for i, submit in reversed(list(enumerate(submits))):
        service.engine.gain(submit.uid, str(i), [i], Finish.LENGTH)


def test_each_sample_is_a_request_that_names_the_first(run: Any, in_process: Any) -> None:
    """Prompt by prompt and in order, each prompt tokenized once."""

    async def test() -> None:
        async with in_process(echo=False) as service:
            encoded: list[str] = []

            class Tokenizer(ByteTokenizer):
                def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
                    encoded.append(text)
                    return super().encode(text, add_special_tokens)

            service.front.tokenizer = Tokenizer()
            params = [{"n": 3}, {"n": 1}, {"n": 2, "sampling_seed": 7}]
            task = asyncio.create_task(
                service.generate(
                    text=["a", "b", "c"], sampling_params=params, priority=[5, 0, -5], cache_salt="s"
                )
            )
            submits = await take(service, 6)
            first, _, _, alone, last, _ = uids = [m.uid for m in submits]
            assert len(set(uids)) == 6
            assert [m.leader for m in submits] == [-1, first, first, -1, -1, last]
            assert alone not in (first, last)
            assert [(m.input_ids[:1], m.priority, m.cache_salt) for m in submits] == [
                *[(b"a", 5, "s")] * 3,
                (b"b", 0, "s"),
                *[(b"c", -5, "s")] * 2,
            ]
            assert encoded == ["a", "b", "c"]
            seeds = [m.seed for m in submits]
            assert len(set(seeds)) == 6
            assert seeds[4:] == sample_seeds(7, 2)
            end(service, submits)
            assert [a["text"] for a in (await task).json()] == list("012345")

    run(test())


@pytest.mark.parametrize(
    ("body", "texts"),
    [
        ({"text": "a", "sampling_params": {"n": 1}}, None),
        ({"text": "a", "sampling_params": {"n": 3}}, ["a"] * 3),
        ({"text": ["a", "b"], "sampling_params": {"n": 2}}, ["a", "a", "b", "b"]),
        ({"text": ["a", "b"], "sampling_params": [{"n": 1}, {"n": 2}]}, ["a", "b", "b"]),
        ({"text": ["a"], "sampling_params": {"n": 1}}, ["a"]),
        ({"input_ids": [97], "sampling_params": {"n": 2}}, ["a"] * 2),
    ],
)
def test_shapes(run: Any, in_process: Any, body: dict[str, Any], texts: list[str] | None) -> None:
    """One answer is an object; several are one flat list, prompt by prompt."""

    async def test() -> None:
        async with in_process() as service:
            answer = (await service.generate(**body, rid="x")).json()
            if texts is None:
                assert (answer["text"], answer["meta_info"]["id"]) == ("a", "x")
                return
            assert [a["text"] for a in answer] == texts
            assert [a["meta_info"]["id"] for a in answer] == [f"x_{i}" for i in range(len(texts))]
            assert all(a["meta_info"]["prompt_tokens"] == 3 for a in answer)

    run(test())


@pytest.mark.parametrize(
    ("body", "prompts"),
    [
        ({"text": "a", "sampling_params": {"n": 2}}, 1),
        ({"text": ["a", "b"], "sampling_params": {"n": 2}}, 2),
        ({"text": ["a"]}, 1),
    ],
)
def test_every_event_of_a_list_carries_its_index(
    run: Any, on_a_socket: Any, body: dict[str, Any], prompts: int
) -> None:
    async def test() -> None:
        async with on_a_socket() as service:
            stream = service.stream(**body)
            count = prompts * body.get("sampling_params", {}).get("n", 1)
            submits = await take(service, count)
            got = []
            for i, submit in reversed(list(enumerate(submits))):
                service.engine.gain(submit.uid, "x", [i])
                got.append(await stream.next())
                service.engine.gain(submit.uid, "y", [i], Finish.LENGTH)
                got.append(await stream.next())
            assert [(e["index"], e["text"]) for e in got] == [
                (i, text) for i in reversed(range(count)) for text in ("x", "xy")
            ]
            assert [await stream.next(), await stream.next()] == ["[DONE]", None]

    run(test())


def test_a_single_answer_carries_no_index(run: Any, on_a_socket: Any) -> None:
    async def test() -> None:
        async with on_a_socket() as service:
            stream = service.stream(text="a", sampling_params={"n": 1})
            service.engine.gain((await service.engine.take(Submit)).uid, "x", [1], Finish.LENGTH)
            assert "index" not in await stream.next()
            await stream.close()

    run(test())


def test_a_request_id_is_taken_with_all_that_it_stands_for(run: Any, in_process: Any) -> None:
    """The id that was given, and each sample's own, until the last sample has ended."""

    async def test() -> None:
        async with in_process(echo=False) as service:
            task = asyncio.create_task(service.generate(text="a", rid="x", sampling_params={"n": 2}))
            submits = await take(service, 2)
            named = service.front.registry._named
            assert {name: {s.uid for s in states} for name, states in named.items()} == {
                "x": {m.uid for m in submits},
                "x_0": {submits[0].uid},
                "x_1": {submits[1].uid},
            }
            service.engine.gain(submits[0].uid, "0", [0], Finish.LENGTH)
            for rid in ("x", "x_1", ["y", "x"], ["y", "x_1"]):
                text = "b" if isinstance(rid, str) else ["b", "c"]
                refused = await service.generate(text=text, rid=rid)
                assert (refused.status_code, refused.json()["error"]["param"]) == (409, "rid")
            service.engine.gain(submits[1].uid, "1", [1], Finish.LENGTH)
            assert (await task).status_code == 200
            assert named == {}

    run(test())


@pytest.mark.parametrize("rid", [["x", "x"], ["x", "x_0"], ["x_1", "x"]])
def test_samples_whose_ids_would_meet_are_refused(run: Any, in_process: Any, rid: list[str]) -> None:
    async def test() -> None:
        async with in_process() as service:
            refused = await service.generate(
                text=["a", "b"], rid=rid, sampling_params=[{"n": 2}, {"n": 2 if "x_1" in rid else 1}]
            )
            assert (refused.status_code, refused.json()["error"]["param"]) == (409, "rid")
            assert (service.engine.sent, service.front.registry._named) == ([], {})

    run(test())


def test_samples_count_for_the_limit_of_requests_alive(run: Any, in_process: Any) -> None:
    async def test() -> None:
        async with in_process(max_queued_requests=3) as service:
            assert (await service.generate(text="a", sampling_params={"n": 4})).status_code == 503
            assert (await service.generate(text="a", sampling_params={"n": 3})).status_code == 200

    run(test())


@pytest.mark.parametrize("stream", [False, True])
def test_a_disconnect_aborts_each_sample_that_runs_once(run: Any, on_a_socket: Any, stream: bool) -> None:
    async def test() -> None:
        async with on_a_socket() as service:
            task = asyncio.create_task(service.generate(text="a", stream=stream, sampling_params={"n": 4}))
            uids = [m.uid for m in await take(service, 4)]
            service.engine.gain(uids[2], "x", [1], Finish.LENGTH)
            task.cancel()
            running = {uids[0], uids[1], uids[3]}
            assert {(await service.engine.take(Abort)).uid for _ in running} == running
            await asyncio.wait_for(service.front.registry.idle.wait(), 20)
            for uid in running:
                service.engine.gain(uid, finish=Finish.ABORT)
            assert (len(service.front.registry), len(service.engine.aborts())) == (0, 3)

    run(test())


def test_a_failed_sample_fails_the_answer_and_aborts_the_others(run: Any, in_process: Any) -> None:
    async def test() -> None:
        async with in_process(echo=False) as service:
            task = asyncio.create_task(service.generate(text="a", sampling_params={"n": 3}))
            uids = [m.uid for m in await take(service, 3)]
            service.engine.gain(uids[0], finish=Finish.FAILED, message="no room", code="capacity")
            assert (await task).status_code == 503
            assert service.engine.aborts() == uids[1:]

    run(test())


def test_unseeded_samples_differ_and_repeat_with_the_servers_seed(run: Any, in_process: Any) -> None:
    async def seeds(random_seed: int) -> list[int]:
        async with in_process(random_seed=random_seed) as service:
            await service.generate(text=["a", "b"], sampling_params={"n": 2})
            return [m.seed for m in service.engine.sent]

    async def test() -> None:
        assert len(set(await seeds(5))) == 4
        assert await seeds(5) == await seeds(5)
        assert await seeds(5) != await seeds(6)

    run(test())
