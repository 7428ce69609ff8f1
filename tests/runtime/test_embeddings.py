"""Embeddings through the real server, by the openai client, and by the offline engine."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import openai
import pytest
import torch
from embeddings import normalised, toy_state
from transformers_demo import transformers_demo

from gapless import Engine
from gapless.runtime.core.errors import RequestError
from gapless.runtime.tokenizer.byte_tokenizer import ByteTokenizer
from gapless.runtime.tokenizer.load import load_tokenizer

MODES = [(), ("--disable-overlap-schedule",), ("--num-scheduler-steps=4", "--chunked-prefill-size=16")]
TEXTS = ["a", "the same beginning, and more", "the same beginning, and more", "the same beginning", "z" * 700]

encode = ByteTokenizer().encode


def expected(text: str, dimensions: int | None = None) -> np.ndarray:
    return normalised(toy_state(encode(text)), dimensions)


def connect(server: Any) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


@pytest.mark.parametrize("options", MODES, ids=str)
def test_the_openai_client_beside_requests_that_generate(serve: Any, options: tuple[str, ...]) -> None:
    server = serve(*options)
    noise = server.stream(text="neighbour", sampling_params={"max_new_tokens": 300, "ignore_eos": True})
    with connect(server) as client:
        for more in ({}, {"encoding_format": "float"}, {"dimensions": 3}):
            answer = client.embeddings.create(model="toy", input=TEXTS, **more)
            for text, item in zip(TEXTS, answer.data, strict=True):
                np.testing.assert_allclose(item.embedding, expected(text, more.get("dimensions")), rtol=1e-5)
            assert answer.usage.prompt_tokens == sum(len(encode(text)) for text in TEXTS)
        with pytest.raises(openai.BadRequestError) as long:
            client.embeddings.create(model="toy", input=["a", "x" * 5000])
        assert long.value.param == "input[1]"
        assert "5000" in str(long.value) and "4095" in str(long.value)
        with pytest.raises(openai.BadRequestError, match="1 to 8"):
            client.embeddings.create(model="toy", input="a", dimensions=9)
    noise.wait_end()
    assert noise.done


def test_many_at_once(serve: Any) -> None:
    server = serve("--max-running-requests=4", "--max-total-tokens=512", "--context-length=256")

    async def test() -> None:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:

            async def embedded(number: int) -> None:
                text = f"number {number} " * (1 + number % 9)
                answer = await client.embeddings.create(model="toy", input=text)
                np.testing.assert_allclose(answer.data[0].embedding, expected(text), rtol=1e-5)

            await asyncio.gather(*map(embedded, range(60)))

    asyncio.run(test())


def test_the_engine() -> None:
    with Engine("toy") as engine:
        one, several = engine.embed("abc"), engine.embed(TEXTS, dimensions=5)
        assert (one.dtype, one.shape, several.shape) == (np.float32, (8,), (len(TEXTS), 5))
        np.testing.assert_allclose(one, expected("abc"), rtol=1e-5)
        np.testing.assert_allclose(several, [expected(text, 5) for text in TEXTS], rtol=1e-5)
        assert (engine.embed(input_ids=list(b"abc")) == one).all()
        assert (engine.embed(input_ids=[list(b"abc")]) == one[None]).all()
        for fields, param in (
            ({"prompt": ""}, "text"),
            ({"prompt": "a", "dimensions": 9}, "dimensions"),
            ({"input_ids": [[1], [600]]}, "input_ids[1][0]"),
        ):
            with pytest.raises(RequestError) as refused:
                engine.embed(**fields)
            assert refused.value.param == param


@pytest.mark.slow
def test_the_demo_model_says_what_transformers_says() -> None:
    texts = ["The capital of France is Paris.", "Paris is France's capital city.", "def f(x): return x"]
    with Engine("demo", dtype="float32", max_total_tokens=1024) as engine:
        found = engine.embed(texts)
    model, tokenizer = transformers_demo(), load_tokenizer("demo")
    for text, values in zip(texts, found, strict=True):
        with torch.inference_mode():
            states = model(torch.tensor([tokenizer.encode(text)]), output_hidden_states=True).hidden_states
        np.testing.assert_allclose(values, normalised(states[-1][0, -1].numpy()), atol=1e-4)
