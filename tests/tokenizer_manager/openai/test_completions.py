"""POST /v1/completions, mostly as the openai client sees it."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest

from gapless.runtime.core.messages import Finish


def test_a_prompt_and_its_usage(run: Any, client: Any) -> None:
    async def test() -> None:
        async with client() as c:
            answer, prompts = await c.complete("xyz", prompt="abc", seed=7, stop="Q")
            assert prompts == ["abc"]
            assert (answer.object, answer.model) == ("text_completion", "toy")
            assert answer.id.startswith("cmpl-")
            (choice,) = answer.choices
            assert (choice.index, choice.text, choice.finish_reason) == (0, "xyz", "stop")
            usage = answer.usage
            assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (3, 3, 6)
            assert usage.prompt_tokens_details.cached_tokens == 1

    run(test())


def test_fields_reach_the_engine_under_its_names(run: Any, client: Any) -> None:
    async def test() -> None:
        async with client() as c:
            task = asyncio.create_task(
                c.api.completions.create(
                    model="default", prompt="a", max_tokens=9, temperature=0.5, top_p=0.5, seed=-3, stop=["x", "y"],
                    frequency_penalty=1, presence_penalty=-1, logit_bias={"5": 2}, user="me",
                    extra_body={
                        "top_k": 3, "min_p": 0.1, "min_tokens": 2, "repetition_penalty": 1.5, "stop_token_ids": [7],
                        "ignore_eos": True, "skip_special_tokens": False, "no_stop_trim": True, "priority": 4,
                        "extra_key": "k", "cache_salt": "s", "background": None, "unheard_of": 1,
                    },
                )
            )  # fmt: skip
            uid, _, submit = await c.prompt()
            c.engine.gain(uid, "x", [1], Finish.LENGTH)
            assert (await task).choices[0].finish_reason == "length"
            p = submit.params
            assert (p.max_new_tokens, p.min_new_tokens, p.temperature, p.top_p, p.top_k) == (
                9,
                2,
                0.5,
                0.5,
                3,
            )
            assert (p.frequency_penalty, p.presence_penalty, p.repetition_penalty, p.min_p) == (
                1,
                -1,
                1.5,
                0.1,
            )
            assert (p.stop, p.logit_bias, p.sampling_seed) == (("x", "y"), {5: 2.0}, -3)
            assert (p.ignore_eos, p.skip_special_tokens, p.no_stop_trim) == (True, False, True)
            assert (submit.priority, submit.extra_key, submit.cache_salt) == (4, "k", "s")
            assert submit.stop_ids == (7,)

    run(test())


def test_sixteen_tokens_where_no_number_is_given(run: Any, client: Any) -> None:
    async def test() -> None:
        async with client() as c:
            task = asyncio.create_task(c.api.completions.create(model="toy", prompt="a", max_tokens=None))
            uid, _, submit = await c.prompt()
            assert submit.params.max_new_tokens == 16
            c.engine.gain(uid, "", [256], Finish.STOP_TOKEN)
            assert (await task).choices[0].text == ""

    run(test())


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        (["a", "bc"], ["a", "bc"]),
        ([97, 98], ["ab"]),
        ([[97], [98, 99]], ["a", "bc"]),
    ],
)
def test_prompts_of_every_kind(run: Any, client: Any, prompt: Any, prompts: list[str]) -> None:
    async def test() -> None:
        async with client() as c:
            answer, seen = await c.complete(*map(str.upper, prompts), prompt=prompt)
            assert seen == prompts
            assert [(choice.index, choice.text) for choice in answer.choices] == list(
                enumerate(map(str.upper, prompts))
            )

    run(test())


def test_samples_of_prompts_count_their_prompt_once(run: Any, client: Any) -> None:
    async def test() -> None:
        async with client() as c:
            answer, _ = await c.complete("p", "q", "rr", "s", prompt=["a", "b"], n=2)
            assert [(choice.index, choice.text) for choice in answer.choices] == list(
                enumerate(["p", "q", "rr", "s"])
            )
            assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (6, 5)
            assert answer.usage.prompt_tokens_details.cached_tokens == 2

    run(test())


@pytest.mark.parametrize(
    ("options", "in_chunks", "last"),
    [
        (None, [False, False], False),
        ({"include_usage": True}, [False, False], True),
        ({"include_usage": True, "continuous_usage_stats": True}, [True, True], True),
        ({"include_usage": None}, [False, False], False),
    ],
)
def test_a_stream_and_its_usage(
    run: Any, client: Any, options: Any, in_chunks: list[bool], last: bool
) -> None:
    async def test() -> None:
        async with client() as c:
            task = asyncio.create_task(
                c.api.completions.create(model="toy", prompt="a", stream=True, stream_options=options)
            )
            uid, _, _ = await c.prompt()
            c.engine.gain(uid, "x", [1])
            stream = await task
            chunks = [await anext(stream)]
            c.engine.gain(uid, "yz", [2, 3], Finish.LENGTH)
            chunks += [chunk async for chunk in stream]
            usages = [chunk.usage for chunk in chunks]
            if last:
                final = chunks.pop()
                assert final.choices == []
                assert (final.usage.prompt_tokens, final.usage.completion_tokens) == (3, 3)
            assert [c.choices[0].text for c in chunks] == ["x", "yz"]
            assert [c.choices[0].finish_reason for c in chunks] == [None, "length"]
            assert len({c.id for c in chunks}) == 1
            assert [usage is not None for usage in usages] == in_chunks + [True] * last
            if in_chunks[0]:
                assert [usage.completion_tokens for usage in usages] == [1, 3, 3]

    run(test())


def test_a_streams_samples_have_their_index(run: Any, client: Any) -> None:
    async def test() -> None:
        async with client() as c:
            task = asyncio.create_task(c.api.completions.create(model="toy", prompt="a", n=2, stream=True))
            (first, _, _), (second, _, _) = await c.prompt(), await c.prompt()
            c.engine.gain(second, "s", [1], Finish.LENGTH)
            c.engine.gain(first, "f", [1], Finish.LENGTH)
            choices = [chunk.choices[0] async for chunk in await task]
            assert sorted((choice.index, choice.text) for choice in choices) == [(0, "f"), (1, "s")]

    run(test())


def test_a_failure_before_the_first_token_is_a_status_and_later_an_event(run: Any, client: Any) -> None:
    async def test() -> None:
        async with client() as c:
            failure = {"finish": Finish.FAILED, "message": "no room", "code": "capacity"}
            task = asyncio.create_task(c.api.completions.create(model="toy", prompt="a", stream=True))
            c.engine.gain((await c.prompt())[0], **failure)
            with pytest.raises(openai.InternalServerError) as refused:
                await task
            assert refused.value.status_code == 503
            task = asyncio.create_task(c.api.completions.create(model="toy", prompt="a", stream=True))
            uid, _, _ = await c.prompt()
            c.engine.gain(uid, "x", [1])
            stream = await task
            assert (await anext(stream)).choices[0].text == "x"
            c.engine.gain(uid, **failure)
            with pytest.raises(openai.APIError, match="no room"):
                await anext(stream)
            await stream.close()

    run(test())


def test_a_request_id_aborts_it(run: Any, client: Any) -> None:
    """What ends early says so."""

    async def test() -> None:
        async with client() as c:
            task = asyncio.create_task(
                c.api.completions.create(model="toy", prompt="a", extra_body={"rid": "mine"})
            )
            uid, _, _ = await c.prompt()
            await c.service.client.post("/abort_request", json={"rid": "mine"})
            assert c.engine.aborts() == [uid]
            c.engine.gain(uid, finish=Finish.ABORT)
            answer = await task
            assert (answer.id, answer.choices[0].finish_reason) == ("mine", "abort")

    run(test())


LONG = "x" * 8001


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({}, None, "missing required field `prompt`"),
        ({"prompt": []}, "prompt", ""),
        ({"prompt": [[]]}, "prompt[0]", ""),
        ({"prompt": ""}, "prompt", "the prompt has no tokens"),
        ({"prompt": ["a", ""]}, "prompt[1]", "the prompt has no tokens"),
        ({"prompt": ["a", 1]}, "prompt", "must not mix"),
        ({"prompt": [1, -1]}, "prompt[1]", ""),
        ({"prompt": [1, 600]}, "prompt[1]", "prompt[1] must be a token id from 0 to 599"),
        ({"prompt": LONG}, "prompt", "8001 tokens; the longest that fits is 8000"),
        ({"prompt": "a", "max_tokens": -1}, "max_tokens", ""),
        ({"prompt": "a", "max_tokens": "5"}, "max_tokens", ""),
        ({"prompt": "a", "max_tokens": 5.0}, "max_tokens", ""),
        ({"prompt": "a", "max_tokens": 2**63}, "max_tokens", ""),
        ({"prompt": "a", "min_tokens": 17}, "min_tokens", "min_tokens must be at most max_tokens, which is 16"),
        ({"prompt": "a", "temperature": -1}, "temperature", ""),
        ({"prompt": "a", "top_p": 0}, "top_p", ""),
        ({"prompt": "a", "top_p": 1.1}, "top_p", ""),
        ({"prompt": "a", "top_k": 0}, "top_k", "top_k must be"),
        ({"prompt": "a", "top_k": -2}, "top_k", ""),
        ({"prompt": "a", "n": 0}, "n", ""),
        ({"prompt": "a", "n": 2000}, "n", "n asks for 2000 samples"),
        ({"prompt": "a", "seed": 2**63}, "seed", ""),
        ({"prompt": "a", "stop": [""]}, "stop", "stop must be"),
        ({"prompt": "a", "logit_bias": {"600": 1}}, "logit_bias[600]", "logit_bias[600] must be"),
        ({"prompt": "a", "logit_bias": {"x": 1}}, "logit_bias", "logit_bias must be"),
        ({"prompt": "a", "stop_token_ids": [600]}, "stop_token_ids[0]", "stop_token_ids[0] must be"),
        ({"prompt": "a", "stream_options": {"include_usage": 1}}, "stream_options.include_usage", ""),
        ({"prompt": "a", "regex": "a", "ebnf": "b"}, "ebnf", "give regex or ebnf, not both"),
        ({"prompt": "a", "suffix": "b"}, "suffix", "suffix is not supported"),
        ({"prompt": "a", "best_of": 2}, "best_of", "best_of is not supported"),
        ({"prompt": "a", "lora_path": "x"}, "lora_path", "lora_path is not supported"),
        ({"prompt": "a", "rid": ""}, "rid", ""),
        ({"prompt": "a", "timeout": 0}, "timeout", ""),
    ],
)  # fmt: skip
@pytest.mark.parametrize("stream", [False, True])
def test_what_is_wrong_is_a_400_that_names_the_field(
    run: Any, client: Any, body: dict[str, Any], param: str | None, message: str, stream: bool
) -> None:
    async def test() -> None:
        async with client() as c:
            error = await c.refused("/v1/completions", model="toy", stream=stream, **body)
            assert error["param"] == param
            assert message in error["message"]
            assert error["type"] == "invalid_request_error"

    run(test())


@pytest.mark.parametrize("model", [None, "toy", "default", "served"])
def test_names_of_the_model(run: Any, client: Any, model: str | None) -> None:
    async def test() -> None:
        async with client(served_model_name="served") as c:
            answer, _ = await c.complete("x", prompt="a", model=model)
            assert answer.model == "served"
            error = await c.service.client.post("/v1/completions", json={"prompt": "a", "model": "other"})
            assert (error.status_code, error.json()["error"]["code"]) == (404, "model_not_found")

    run(test())


def test_values_that_ask_for_nothing_are_taken(run: Any, client: Any) -> None:
    nothing = {"suffix": "", "best_of": 1, "lora_path": None, "logit_bias": None, "n": None}

    async def test() -> None:
        async with client(strict_fields=True) as c:
            answer, _ = await c.complete("x", prompt="a", user="me", extra_body=nothing)
            assert answer.choices[0].text == "x"
            response = await c.service.client.post("/v1/completions", json={"prompt": "a", "typo": 1})
            assert (response.status_code, response.json()["error"]["param"]) == (400, "typo")

    run(test())
