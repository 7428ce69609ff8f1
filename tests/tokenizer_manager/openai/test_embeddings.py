"""POST /v1/embeddings, mostly as the openai client sees it."""

from __future__ import annotations

import asyncio
import base64
from typing import Any

import numpy as np
import openai
import pytest
from embeddings import normalised

from gapless.runtime.core.logprobs import Logprobs
from gapless.runtime.core.messages import Finish, Finished, Submit, TextOutput, int32s
from gapless.tokenizer_manager.openai.embeddings import EmbeddingBody

STATE = np.array([3, -4, 12, 84], np.float32)
URL = "/v1/embeddings"


def embed(client: Any, submit: Submit, state: np.ndarray = STATE) -> None:
    """The engine's answer: what the prompt gained, and its end."""
    uid, tokens = submit.uid, len(int32s(submit.input_ids))
    found = Logprobs(b"", b"", b"", b"", state.tobytes())
    end = Finished(uid, Finish.LENGTH, None, "", "", tokens, 0, 0)
    client.engine.front.handle(TextOutput(b"", [], b"", b"", [end], [(uid, tokens, 0)], [(uid, True, found)]))


async def answered(client: Any, call: Any, count: int = 1) -> tuple[Any, list[Submit]]:
    task = asyncio.create_task(call)
    submits = [await client.engine.take(Submit) for _ in range(count)]
    for number, submit in enumerate(submits):
        embed(client, submit, STATE + np.float32(number))
    return await task, submits


def ready(client: Any) -> None:
    client.engine.front.ready.hidden_size = len(STATE)


@pytest.mark.parametrize("encoding", [{}, {"encoding_format": "float"}, {"encoding_format": "base64"}])
@pytest.mark.parametrize("dimensions", [None, 1, 3, 4])
def test_an_embedding_and_its_usage(run: Any, client: Any, encoding: Any, dimensions: int | None) -> None:
    """Without a format the client asks for base64 and decodes it."""

    async def test() -> None:
        async with client() as c:
            ready(c)
            more = encoding | ({} if dimensions is None else {"dimensions": dimensions})
            call = c.api.embeddings.create(model="toy", input="abcd", user="me", **more)
            answer, (submit,) = await answered(c, call)
            assert (submit.embed, submit.params.max_new_tokens, submit.logprobs) == (True, 0, None)
            assert (answer.object, answer.model) == ("list", "toy")
            assert (answer.usage.prompt_tokens, answer.usage.total_tokens) == (4, 4)
            (item,) = answer.data
            assert (item.object, item.index) == ("embedding", 0)
            values = item.embedding
            if encoding.get("encoding_format") == "base64":
                values = np.frombuffer(base64.b64decode(values), "<f4")
            np.testing.assert_allclose(values, normalised(STATE, dimensions), rtol=1e-6)

    run(test())


@pytest.mark.parametrize(
    ("given", "ids"),
    [
        (["ab", "c"], [[97, 98], [99]]),
        (["ab"], [[97, 98]]),
        ([5, 6, 7], [[5, 6, 7]]),
        ([[5, 6], [7]], [[5, 6], [7]]),
    ],
)
def test_every_form_of_the_input(run: Any, client: Any, given: Any, ids: list[list[int]]) -> None:
    async def test() -> None:
        async with client() as c:
            answer, submits = await answered(c, c.api.embeddings.create(model="toy", input=given), len(ids))
            assert [int32s(submit.input_ids).tolist() for submit in submits] == ids
            assert [item.index for item in answer.data] == list(range(len(ids)))
            for number, item in enumerate(answer.data):
                np.testing.assert_allclose(item.embedding, normalised(STATE + number), rtol=1e-6)
            assert answer.usage.total_tokens == sum(map(len, ids))

    run(test())


def test_a_raw_client_gets_floats_and_fields_reach_the_engine(run: Any, client: Any) -> None:
    async def test() -> None:
        async with client() as c:
            body = {"input": "a", "priority": 3, "extra_key": "k", "cache_salt": "s", "unheard_of": 1}
            response, (submit,) = await answered(c, c.service.client.post(URL, json=body))
            (item,) = response.json()["data"]
            np.testing.assert_allclose(item["embedding"], normalised(STATE), rtol=1e-6)
            assert (submit.priority, submit.extra_key, submit.cache_salt) == (3, "k", "s")

    run(test())


def test_a_state_of_zeros_stays_one(run: Any, client: Any) -> None:
    async def test() -> None:
        async with client() as c:
            task = asyncio.create_task(c.api.embeddings.create(model="toy", input="a"))
            embed(c, await c.engine.take(Submit), np.zeros(4, np.float32))
            assert (await task).data[0].embedding == [0.0] * 4

    run(test())


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({}, None, ["input"]),
        ({"input": ""}, "input", ["length >= 1"]),
        ({"input": []}, "input", ["length >= 1"]),
        ({"input": ["a", ""]}, "input[1]", ["length >= 1"]),
        ({"input": [[1], []]}, "input[1]", ["length >= 1"]),
        ({"input": 5}, "input", []),
        ({"input": {"a": 1}}, "input", []),
        ({"input": [1.5]}, "input[0]", []),
        ({"input": ["a", 5]}, "input", ["mix"]),
        ({"input": [5, [5]]}, "input", ["mix"]),
        ({"input": [[1], [2, 600]]}, "input[1][1]", ["599"]),
        ({"input": [True]}, "input[0]", []),
        ({"input": "x" * 8001}, "input", ["8001", "8000"]),
        ({"input": ["a", "x" * 9000]}, "input[1]", ["9000", "8000"]),
        ({"input": [1] * 8001}, "input", ["8001", "8000"]),
        ({"input": ["a"] * 5}, "input", ["5", "4"]),
        ({"input": [[1]] * 5}, "input", ["5", "4"]),
        ({"input": "a", "dimensions": 0}, "dimensions", []),
        ({"input": "a", "dimensions": 5}, "dimensions", ["1 to 4", "5"]),
        ({"input": "a", "dimensions": "3"}, "dimensions", []),
        ({"input": "a", "encoding_format": "hex"}, "encoding_format", []),
        ({"input": "a", "user": 5}, "user", []),
        ({"input": "a", "timeout": 0}, "timeout", []),
    ],
)
def test_what_is_refused_is_named(run: Any, client: Any, body: Any, param: str, words: list[str]) -> None:
    async def test() -> None:
        async with client(max_batch_requests=4) as c:
            ready(c)
            error = await c.refused(URL, model="toy", **body)
            assert error["param"] == param, error
            assert all(word in error["message"] for word in words), error["message"]

    run(test())


def test_unknown_models_and_fields(run: Any, client: Any) -> None:
    async def test() -> None:
        async with client(strict_fields=True) as c:
            error = await c.refused(URL, 404, model="other", input="a")
            assert (error["param"], error["code"]) == ("model", "model_not_found")
            assert (await c.refused(URL, input="a", stream=True))["param"] == "stream"
            given = dict.fromkeys(EmbeddingBody.__struct_fields__) | {"input": "a"}
            response, _ = await answered(c, c.service.client.post(URL, json=given))
            assert response.status_code == 200

    run(test())


def test_an_aborted_one_is_an_error(run: Any, client: Any) -> None:
    async def test() -> None:
        async with client() as c:
            call = c.api.embeddings.create(model="toy", input=["a", "b"], extra_body={"rid": "r"})
            task = asyncio.create_task(call)
            submits = [await c.engine.take(Submit) for _ in range(2)]
            assert (await c.service.client.post("/abort_request", json={"rid": "r"})).status_code == 200
            for submit in submits:
                c.engine.gain(submit.uid, finish=Finish.ABORT)
            with pytest.raises(openai.APIStatusError, match="aborted by request") as aborted:
                await task
            assert aborted.value.status_code == 499

    run(test())


def test_a_failed_one_is_an_error(run: Any, client: Any) -> None:
    async def test() -> None:
        async with client() as c:
            task = asyncio.create_task(c.api.embeddings.create(model="toy", input=["a", "b"]))
            embed(c, await c.engine.take(Submit))
            uid, _, _ = await c.prompt()
            c.engine.gain(uid, finish=Finish.FAILED, message="it broke", code="internal_error")
            with pytest.raises(openai.InternalServerError, match="it broke"):
                await task

    run(test())
