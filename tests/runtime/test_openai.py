"""The openai client against the real server: what its user calls, sync and async, overlap on and off."""

from __future__ import annotations

import asyncio
import enum
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel

CHAT = {"model": "toy", "messages": [{"role": "user", "content": "Hi"}]}
LONG = {"max_tokens": 1500, "extra_body": {"ignore_eos": True}}
# 20 ms a step: a request that nobody aborts runs for 30 s, far beyond what the tests wait for.
SLOW = ("--toy=delay_ms=20", "--chat-template=chatml")


def connect(server: Any, **options: Any) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", **{"api_key": "none", "max_retries": 0} | options)


@pytest.mark.parametrize("options", [(), ("--disable-overlap-schedule",)])
def test_completions_and_chats_whole_and_streamed(serve: Any, options: tuple[str, ...]) -> None:
    server = serve("--chat-template=chatml", *options)
    with connect(server) as client:
        (model,) = client.models.list()
        assert client.models.retrieve(model.id).id == model.id
        body = {"model": model.id, "prompt": ["abc", "de"], "n": 2, "max_tokens": 9, "seed": 3}
        whole = client.completions.create(**body)
        assert [choice.finish_reason for choice in whole.choices] == ["length"] * 4
        assert whole.usage.completion_tokens == 36
        texts = ["", "", "", ""]
        for chunk in client.completions.create(**body, stream=True):
            texts[chunk.choices[0].index] += chunk.choices[0].text
        assert texts == [choice.text for choice in whole.choices]

        chat = client.chat.completions.create(**CHAT, max_completion_tokens=9, seed=3)
        chunks = list(
            client.chat.completions.create(
                **CHAT, max_tokens=9, seed=3, stream=True, stream_options={"include_usage": True}
            )
        )
        assert chunks.pop().usage.completion_tokens == 9
        content = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        assert content == chat.choices[0].message.content != ""
        assert chunks[-1].choices[0].finish_reason == "length"


def test_the_async_client_with_many_at_once(serve: Any) -> None:
    server = serve("--chat-template=chatml")

    async def test() -> None:
        url = f"{server.url}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:

            async def streamed(number: int) -> str:
                messages = [{"role": "user", "content": f"number {number}"}]
                stream = await client.chat.completions.create(
                    model="toy", messages=messages, max_tokens=20, stream=True
                )
                return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

            first = await asyncio.gather(*map(streamed, range(12)))
            assert len(set(first)) == 12
            assert await asyncio.gather(*map(streamed, range(12))) == first

    asyncio.run(test())


@pytest.mark.parametrize("path", ["chat", "completion"])
def test_a_client_that_stops_reading_ends_its_request(serve: Any, path: str) -> None:
    server = serve(*SLOW)
    with connect(server) as client:
        if path == "chat":
            stream = client.chat.completions.create(**CHAT, **LONG, n=2, stream=True)
        else:
            stream = client.completions.create(model="toy", prompt="a", **LONG, n=2, stream=True)
        next(iter(stream))
        server.wait_info("running", 2)
        stream.close()
        server.wait_info("running", 0, 3)


def test_a_client_that_times_out_ends_its_request(serve: Any) -> None:
    server = serve(*SLOW)
    with connect(server, timeout=0.5) as client, pytest.raises(openai.APITimeoutError):
        client.chat.completions.create(**CHAT, **LONG)
    server.wait_info("running", 0, 3)


def test_errors_are_the_clients_own(serve: Any) -> None:
    server = serve("--api-key=secret")
    with connect(server, api_key="secret") as client:
        with pytest.raises(openai.NotFoundError) as unknown:
            client.completions.create(model="other", prompt="a")
        assert (unknown.value.code, unknown.value.param) == ("model_not_found", "model")
        with pytest.raises(openai.NotFoundError):
            client.models.retrieve("other")
        with pytest.raises(openai.BadRequestError, match="--chat-template"):
            client.chat.completions.create(**CHAT, stream=True)
        with pytest.raises(openai.BadRequestError) as long:
            client.completions.create(model="toy", prompt="x" * 5000, stream=True)
        assert "4095" in str(long.value)
        with pytest.raises(openai.NotFoundError):
            client.responses.create(model="toy", input="a")
    with connect(server, api_key="wrong") as client, pytest.raises(openai.AuthenticationError):
        client.completions.create(model="toy", prompt="a")
    assert server.stop() == 0


TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "pick",
            "parameters": {
                "type": "object",
                "properties": {"place": {"enum": ["here", "there"]}},
                "required": ["place"],
                "additionalProperties": False,
            },
        },
    }
]


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "pick"}}])
def test_a_forced_call_of_the_toy_model(serve: Any, choice: Any) -> None:
    """The toy model emits noise: what it calls, it calls because of the grammar."""
    server = serve("--chat-template=chatml")
    with connect(server) as client:
        body: dict[str, Any] = CHAT | {"tools": TOOLS, "tool_choice": choice, "parallel_tool_calls": False}
        (made,) = client.chat.completions.create(**body, max_tokens=300, seed=1).choices
        assert made.finish_reason == "tool_calls"
        (call,) = made.message.tool_calls
        assert call.function.name == "pick"
        with client.chat.completions.stream(**body, max_tokens=300, seed=1) as stream:
            (streamed,) = stream.get_final_completion().choices[0].message.tool_calls
        assert streamed.function.arguments == call.function.arguments


class Color(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Answer(BaseModel):
    color: Color
    count: Literal[1, 2, 3]


class Weather(BaseModel):
    city: Literal["Paris", "Rome"]
    days: Literal[1, 2, 3]


def test_parse_on_the_demo_model(serve: Any) -> None:
    """Objects of the caller's classes, as the answer and as a tool's arguments."""
    server = serve("--model-path=demo", "--chat-template=gemma", "--max-total-tokens=4096", healthy=False)
    server.wait_health(200, 300)
    greedy: dict[str, Any] = {"model": "demo", "temperature": 0, "max_tokens": 60}
    with connect(server, timeout=300) as client:
        ask = [{"role": "user", "content": "Name a colour and a small count."}]
        (made,) = client.chat.completions.parse(**greedy, messages=ask, response_format=Answer).choices
        assert isinstance(made.message.parsed, Answer)
        assert made.finish_reason == "stop"

        ask = [{"role": "user", "content": "What is the weather in Rome for 2 days?"}]
        tool: dict[str, Any] = {"tools": [openai.pydantic_function_tool(Weather)], "tool_choice": "required"}
        (made,) = client.chat.completions.parse(
            **greedy, messages=ask, **tool, parallel_tool_calls=False
        ).choices
        (call,) = made.message.tool_calls
        assert isinstance(call.function.parsed_arguments, Weather)
        assert made.finish_reason == "tool_calls"

        ask = [{"role": "user", "content": "Hi"}]
        answer = client.chat.completions.create(**greedy | {"max_tokens": 2}, messages=ask)
        # <bos> <start_of_turn> user \n Hi <end_of_turn> \n <start_of_turn> model \n: one BOS, and marks as tokens
        assert answer.usage.prompt_tokens == 10
