"""POST /v1/chat/completions, mostly as the openai client sees it."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path
from typing import Any

import openai
import pytest

from gapless.runtime.core.messages import Finish

CHATML = {"chat_template": "chatml"}
HI = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


def messages(*contents: Any) -> dict[str, Any]:
    """A body whose messages are the user's, or what is given as an object."""
    return {
        "messages": [
            c if isinstance(c, dict) and "role" in c else {"role": "user", "content": c} for c in contents
        ]
    }


def test_an_answer(run: Any, client: Any) -> None:
    async def test() -> None:
        async with client(**CHATML) as c:
            answer, prompts = await c.chat("Hello")
            assert prompts == [HI]
            assert (answer.object, answer.model) == ("chat.completion", "toy")
            assert answer.id.startswith("chatcmpl-")
            (choice,) = answer.choices
            assert (choice.message.role, choice.message.content, choice.finish_reason) == (
                "assistant",
                "Hello",
                "stop",
            )
            assert choice.message.tool_calls is None
            assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (3, 5)

    run(test())


def test_a_stream_begins_with_the_role_and_ends_with_the_reason(run: Any, client: Any) -> None:
    async def test() -> None:
        async with client(**CHATML) as c:
            chunks = await c.streamed(["He", "llo"], stream_options={"include_usage": True})
            *chunks, usage = chunks
            assert (usage.choices, usage.usage.completion_tokens) == ([], 3)
            deltas = [chunk.choices[0].delta for chunk in chunks]
            assert (deltas[0].role, deltas[0].content) == ("assistant", "")
            assert "".join(delta.content or "" for delta in deltas) == "Hello"
            reasons = [chunk.choices[0].finish_reason for chunk in chunks]
            assert reasons == [None] * (len(chunks) - 1) + ["stop"]
            assert [delta.role for delta in deltas[1:]] == [None] * (len(deltas) - 1)
            assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}

    run(test())


def test_samples_in_a_stream_each_have_a_role_and_an_end(run: Any, client: Any) -> None:
    async def test() -> None:
        async with client(**CHATML) as c:
            body = {"model": "toy", "n": 2, "stream": True} | messages("Hi")
            task = asyncio.create_task(c.api.chat.completions.create(**body))
            (first, _, _), (second, _, _) = await c.prompt(), await c.prompt()
            c.engine.gain(second, "s", [1], Finish.LENGTH)
            c.engine.gain(first, "f", [1], Finish.STOP_TOKEN)
            seen: dict[int, list[Any]] = {0: [], 1: []}
            async for chunk in await task:
                (choice,) = chunk.choices
                seen[choice.index].append((choice.delta.role, choice.delta.content, choice.finish_reason))
            assert seen == {
                index: [("assistant", "", None), (None, text, None), (None, None, reason)]
                for index, text, reason in [(0, "f", "stop"), (1, "s", "length")]
            }

    run(test())


@pytest.mark.parametrize(
    ("limits", "most"),
    [
        ({"max_tokens": 7}, 7),
        ({"max_completion_tokens": 8}, 8),
        ({"max_tokens": 7, "max_completion_tokens": 8}, 8),
        ({"max_completion_tokens": None}, 9000 - len(HI)),
    ],
)
def test_how_long_an_answer_may_be(run: Any, client: Any, limits: dict[str, Any], most: int) -> None:
    async def test() -> None:
        async with client(**CHATML) as c:
            task = asyncio.create_task(c.api.chat.completions.create(model="toy", **messages("Hi"), **limits))
            uid, _, submit = await c.prompt()
            # The byte tokenizer has merges: what counts is the room that the prompt's tokens leave.
            assert most <= submit.params.max_new_tokens <= most + len(HI) * (most > 100)
            c.engine.gain(uid, "", [1], Finish.LENGTH)
            await task

    run(test())


ASSISTANT = {"role": "assistant", "content": None, "tool_calls": []}
CALLING = {
    "role": "assistant",
    "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}],
}


@pytest.mark.parametrize(
    ("contents", "prompt"),
    [
        (([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],), "user\na\nb"),
        (("a", ASSISTANT, "b"), "assistant\n<|im_end|>"),
        (("a", CALLING, {"role": "tool", "tool_call_id": "c", "content": "7"}), '"arguments": {"x": 1}}'),
        (({"role": "developer", "content": "Be brief."}, "a"), "system\nBe brief."),
        (({"role": "system", "content": [{"type": "text", "text": "Be"}]}, "a"), "system\nBe<"),
        (([],), "user\n<|im_end|>"),
    ],
)
def test_what_the_template_sees(run: Any, client: Any, contents: Any, prompt: str) -> None:
    async def test() -> None:
        async with client(**CHATML) as c:
            _, (seen,) = await c.chat("x", **messages(*contents))
            assert prompt in seen
            assert "None" not in seen

    run(test())


def test_a_body_as_sglangs_router_writes_it(run: Any, client: Any) -> None:
    """It sends null for what its client left out, fields of its own, and max_tokens under the newer name."""
    nulls = (
        "max_tokens", "stop", "seed", "logit_bias", "tools", "tool_choice", "parallel_tool_calls", "functions",
        "function_call", "response_format", "stream_options", "top_logprobs", "lora_path", "session_params",
        "chat_template_kwargs", "temperature", "top_p", "n", "user", "rid", "min_tokens", "regex", "ebnf",
    )  # fmt: skip
    own = {
        "logprobs": False, "separate_reasoning": True, "stream_reasoning": True, "return_hidden_states": False,
        "continue_final_message": False, "no_stop_trim": False, "ignore_eos": False, "skip_special_tokens": True,
        "log_metrics": True, "background": False, "no_logs": False, "return_bytes": False, "return_entropy": False,
    }  # fmt: skip

    async def test() -> None:
        async with client(**CHATML) as c:
            body = dict.fromkeys(nulls) | own | messages("Hi") | {"model": "toy", "max_completion_tokens": 5}
            task = asyncio.create_task(c.service.client.post("/v1/chat/completions", json=body))
            uid, _, submit = await c.prompt()
            assert submit.params.max_new_tokens == 5
            c.engine.gain(uid, "x", [1], Finish.LENGTH)
            response = await task
            assert (response.status_code, response.json()["choices"][0]["message"]["content"]) == (200, "x")

    run(test())


def test_a_template_of_its_own_with_its_own_variables(run: Any, client: Any, tmp_path: Path) -> None:
    file = tmp_path / "own.jinja"
    file.write_text(
        "{{ mood }} {{ reasoning_effort }} {{ messages[0].content }}{{ eos_token }}{{ '>' if add_generation_prompt }}"
    )

    async def test() -> None:
        async with client(chat_template=str(file)) as c:
            kwargs = {
                "chat_template_kwargs": {"mood": "glad", "messages": [], "add_generation_prompt": False}
            }
            _, (seen,) = await c.chat("x", reasoning_effort="low", extra_body=kwargs)
            assert seen == "glad low Hi<eos>>"

    run(test())


def test_without_a_template_there_is_no_chat(run: Any, client: Any) -> None:
    async def test() -> None:
        async with client() as c:
            error = await c.refused("/v1/chat/completions", **messages("Hi"))
            assert "--chat-template" in error["message"]

    run(test())


def test_the_models_own_template_counts_where_none_is_given(run: Any, client: Any) -> None:
    async def test() -> None:
        async with client() as c:
            c.service.front.tokenizer.chat_template = "own: {{ messages[0].content }}"
            _, prompts = await c.chat("x")
            assert prompts == ["own: Hi"]

    run(test())


ROLE = {"role": "wizard", "content": "x"}
FUNCTION = {"type": "function", "function": {"name": "f"}}
BAD_CALL = {"role": "assistant", "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": "{"}}]}


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({"messages": []}, "messages", ""),
        ({}, None, "missing required field `messages`"),
        ({"messages": [{"content": "x"}]}, "messages[0]", "missing required field `role`"),
        (messages(ROLE), "messages", "unknown role: wizard"),
        (messages("a", 7), "messages[1].content", ""),
        (messages([{"type": "text"}]), "messages[0].content[0].text", "must be a string"),
        (messages([{"type": "input_audio"}]), "messages[0].content[0].type", "only text is supported"),
        (messages("a", BAD_CALL), "messages[1].tool_calls[0].function.arguments", "not valid JSON"),
        (
            messages("a", {"role": "assistant", "tool_calls": [{}]}),
            "messages[1].tool_calls[0].function.name",
            "",
        ),
        (messages("x" * 8001), "messages", "the longest that fits is 8000"),
        (messages("a") | {"chat_template": "{{ 1 }}"}, "chat_template", "chat_template is not supported"),
        (messages("a") | {"functions": [{"name": "f"}]}, "functions", "functions is not supported"),
        (messages("a") | {"modalities": ["audio"]}, "modalities", ""),
        (messages("a") | {"max_completion_tokens": -1}, "max_completion_tokens", ""),
        (messages("a") | {"response_format": {"type": "xml"}}, "response_format.type", ""),
        (
            messages("a") | {"response_format": {"type": "json_schema"}},
            "response_format.json_schema.schema",
            "response_format.json_schema.schema is needed",
        ),
        (messages("a") | {"tool_choice": "required"}, "tool_choice", "tools has none"),
        (messages("a") | {"tools": [FUNCTION, FUNCTION]}, "tools", "two functions of one name"),
        (messages("a") | {"tools": [{"type": "function"}]}, "tools[0]", "function"),
        (messages("a") | {"tools": [FUNCTION], "tool_choice": "always"}, "tool_choice", ""),
        (
            messages("a") | {"tools": [FUNCTION], "tool_choice": FUNCTION | {"function": {"name": "g"}}},
            "tool_choice",
            "tool_choice names 'g'",
        ),
        (
            messages("a") | {"tools": [FUNCTION], "response_format": {"type": "json_object"}},
            "response_format",
            "not supported together with tools",
        ),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_what_is_wrong_is_a_400_that_names_the_field(
    run: Any, client: Any, body: dict[str, Any], param: str | None, message: str, stream: bool
) -> None:
    async def test() -> None:
        async with client(**CHATML) as c:
            error = await c.refused("/v1/chat/completions", **body, model="toy", stream=stream)
            assert error["param"] == param
            assert message in error["message"]

    run(test())


@pytest.mark.parametrize("template", ["gemma", "mistral"])
def test_a_template_that_wants_turns_says_so(run: Any, client: Any, template: str) -> None:
    async def test() -> None:
        async with client(chat_template=template) as c:
            with pytest.raises(openai.BadRequestError, match="roles must alternate"):
                await c.api.chat.completions.create(model="toy", **messages("a", "b"))

    run(test())


@pytest.mark.parametrize("part", ["image_url", "video_url", "input_audio", "file"])
def test_nothing_is_fetched_for_a_message(run: Any, client: Any, part: str) -> None:
    async def test() -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            listener.setblocking(False)
            url = f"http://127.0.0.1:{listener.getsockname()[1]}/x.png"
            async with client(**CHATML) as c:
                body = messages([{"type": part, part: {"url": url}}])
                error = await c.refused("/v1/chat/completions", **body)
                assert error["param"] == "messages[0].content[0].type"
            with pytest.raises(BlockingIOError):
                listener.accept()

    run(test())


def test_a_template_without_end_stops_nobody_else(run: Any, client: Any, tmp_path: Path) -> None:
    file = tmp_path / "bomb.jinja"
    loop = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    file.write_text("{% if messages[0].content == 'bomb' %}" + loop + "{% endif %}{{ messages[0].content }}")

    async def test() -> None:
        async with client(chat_template=str(file)) as c:
            bomb = asyncio.create_task(c.api.chat.completions.create(model="toy", **messages("bomb")))
            answer, _ = await c.complete("x", prompt="a")
            assert answer.choices[0].text == "x"
            assert not bomb.done()
            with pytest.raises(openai.BadRequestError, match="took more than"):
                await bomb
            _, prompts = await c.chat("x", **messages("next"))
            assert prompts == ["next"]

    run(test())


@pytest.mark.parametrize(
    ("wanted", "kind"),
    [
        ({"type": "text"}, None),
        ({"type": "json_object"}, "%json"),
        ({"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "integer"}}}, '"integer"'),
    ],
)
def test_response_formats_become_grammars(run: Any, client: Any, wanted: Any, kind: str | None) -> None:
    async def test() -> None:
        async with client(**CHATML) as c:
            body = {"model": "toy", "response_format": wanted} | messages("Hi")
            task = asyncio.create_task(c.api.chat.completions.create(**body))
            uid, _, submit = await c.prompt()
            assert kind in submit.grammar if kind else submit.grammar == ""
            c.engine.gain(uid, "1", [1], Finish.STOP_TOKEN)
            await task

    run(test())


def test_a_bad_schema_is_the_response_formats_fault(run: Any, client: Any) -> None:
    async def test() -> None:
        async with client(**CHATML) as c:
            schema = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "nonsense"}}}
            error = await c.refused("/v1/chat/completions", **messages("a"), response_format=schema)
            assert error["param"] == "response_format"

    run(test())
