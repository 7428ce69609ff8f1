"""Tools in a chat: who may call them, and how calls come out of an answer and of a stream."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import jsonschema
import openai
import pytest

from gapless.runtime.core.messages import Finish
from gapless.tokenizer_manager.openai.api import Function, Tool
from gapless.tokenizer_manager.openai.tool_forced import list_schema

PARAMETERS = {
    "type": "object",
    "properties": {"city": {"$ref": "#/$defs/City"}},
    "required": ["city"],
    "$defs": {"City": {"enum": ["Paris", "Rome"]}},
}
TOOLS = [
    {
        "type": "function",
        "function": {"name": "weather", "description": "Today's.", "parameters": PARAMETERS},
    },
    {"type": "function", "function": {"name": "now"}},
]
MESSAGES = {"messages": [{"role": "user", "content": "Hi"}]}
NAMED = {"type": "function", "function": {"name": "weather"}}
PARIS, NOTHING = '{"city": "Paris"}', "{}"
TEXTS = {
    "chatml": f'On it.\n<tool_call>\n{{"name": "weather", "arguments": {PARIS}}}\n</tool_call>\n'
    '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
    "llama-3": f'{{"name": "weather", "parameters": {PARIS}}}; {{"name": "now", "parameters": {{}}}}',
    "mistral": f'[TOOL_CALLS] [{{"name": "weather", "arguments": {PARIS}}}, {{"name": "now", "arguments": {{}}}}]',
}


def calls_of(chunks: list[Any]) -> list[tuple[int, str, str, str]]:
    """(index, id, name, arguments) of each call; each name comes once."""
    calls: dict[int, list[str]] = {}
    for chunk in chunks:
        for call in chunk.choices[0].delta.tool_calls or []:
            if call.index not in calls:
                calls[call.index] = [call.id, call.function.name, ""]
            else:
                assert call.function.name is None
            calls[call.index][2] += call.function.arguments
    return [(index, *call) for index, call in calls.items()]


@pytest.mark.parametrize("template", TEXTS)
def test_two_calls_in_an_answer_and_in_a_stream(run: Any, client: Any, template: str) -> None:
    text = TEXTS[template]

    async def test() -> None:
        async with client(chat_template=template) as c:
            answer, (prompt,) = await c.chat(text, tools=TOOLS)
            assert '"weather"' in prompt
            (choice,) = answer.choices
            calls = choice.message.tool_calls
            assert [(k.function.name, k.function.arguments) for k in calls] == [
                ("weather", PARIS),
                ("now", NOTHING),
            ]
            assert choice.finish_reason == "tool_calls"
            assert choice.message.content == ("On it." if template == "chatml" else None)
            for pieces in (list(text), [text], [text[i : i + 7] for i in range(0, len(text), 7)]):
                chunks = await c.streamed(pieces, tools=TOOLS)
                streamed = calls_of(chunks)
                assert [(i, n, a) for i, _, n, a in streamed] == [(0, "weather", PARIS), (1, "now", NOTHING)]
                assert len({call_id for _, call_id, _, _ in streamed}) == 2
                content = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
                assert content == (choice.message.content or "")
                assert chunks[-1].choices[0].finish_reason == "tool_calls"

    run(test())


def test_mistrals_ids_are_those_that_its_templates_take(run: Any, client: Any) -> None:
    async def test() -> None:
        async with client(chat_template="mistral") as c:
            answer, _ = await c.chat(TEXTS["mistral"], tools=TOOLS)
            for call in answer.choices[0].message.tool_calls:
                assert len(call.id) == 9
                assert call.id.isalnum()

    run(test())


@pytest.mark.parametrize("cut", ["weather", "Par", "now", "{}"])
@pytest.mark.parametrize("template", TEXTS)
def test_an_answer_that_was_cut_off(run: Any, client: Any, template: str, cut: str) -> None:
    """What is complete is called, the rest is text, and the reason is the length."""
    text = TEXTS[template][: TEXTS[template].find(cut) + len(cut)]

    async def test() -> None:
        async with client(chat_template=template) as c:
            answer, _ = await c.chat(text, tools=TOOLS, finish=Finish.LENGTH)
            (choice,) = answer.choices
            assert choice.finish_reason == "length"
            calls = [(k.function.name, k.function.arguments) for k in choice.message.tool_calls or []]
            assert calls == [("weather", PARIS)][: cut not in ("weather", "Par")]
            chunks = await c.streamed(list(text), tools=TOOLS, finish=Finish.LENGTH)
            assert [(n, a) for _, _, n, a in calls_of(chunks)] == calls
            assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == choice.message.content
            assert chunks[-1].choices[0].finish_reason == "length"

    run(test())


@pytest.mark.parametrize("choice", ["none", None])
def test_no_tools_no_calls(run: Any, client: Any, choice: str | None) -> None:
    """With `none` the model is not told of them, and what looks like a call is text."""
    tools = {"tools": TOOLS, "tool_choice": choice} if choice else {"tools": []}

    async def test() -> None:
        async with client(chat_template="chatml") as c:
            answer, (prompt,) = await c.chat(TEXTS["chatml"], **tools)
            assert "weather" not in prompt
            assert answer.choices[0].message.content == TEXTS["chatml"]
            assert answer.choices[0].finish_reason == "stop"

    run(test())


@pytest.mark.parametrize(
    ("choice", "output", "calls"),
    [
        (NAMED, PARIS, [("weather", PARIS)]),
        ("required", f'[{{"name": "weather", "arguments": {PARIS}}}]', [("weather", PARIS)]),
        (
            "required",
            f'[{{"name":"now","arguments":{{}}}}, {{"name":"weather","arguments":{PARIS}}}]',
            [("now", NOTHING), ("weather", PARIS)],
        ),
    ],
)
def test_a_forced_call_is_kept_to_by_a_grammar(
    run: Any, client: Any, choice: Any, output: str, calls: list[tuple[str, str]]
) -> None:
    async def test() -> None:
        async with client(chat_template="gemma") as c:
            body = {"model": "toy", "tools": TOOLS} | MESSAGES
            task = asyncio.create_task(c.api.chat.completions.create(**body, tool_choice=choice))
            uid, _, submit = await c.prompt()
            assert '"Paris"' in submit.grammar
            c.engine.gain(uid, output, [1], Finish.STOP_TOKEN)
            (made,) = (await task).choices
            assert [(k.function.name, k.function.arguments) for k in made.message.tool_calls] == calls
            assert (made.message.content, made.finish_reason) == (None, "tool_calls")
            chunks = await c.streamed(list(output), tools=TOOLS, tool_choice=choice)
            assert [(n, a) for _, _, n, a in calls_of(chunks)] == calls

    run(test())


def test_the_schema_of_a_list_of_calls_means_what_the_tools_mean() -> None:
    """References within a tool's parameters still find their target."""
    tools = [
        Tool(function=Function(name=t["function"]["name"], parameters=t["function"].get("parameters")))
        for t in TOOLS
    ]  # type: ignore[attr-defined]
    checker = jsonschema.Draft202012Validator(list_schema(tools, 2))
    weather = {"name": "weather", "arguments": {"city": "Paris"}}
    for good in ([weather], [weather, {"name": "now", "arguments": {"any": 1}}]):
        assert checker.is_valid(good)
    for bad in (
        [],
        [weather] * 3,
        [{"name": "weather", "arguments": {"city": "Oslo"}}],
        [{"name": "now"}],
        [{}],
    ):
        assert not checker.is_valid(bad)


def test_a_tool_whose_schema_cannot_be_kept_to(run: Any, client: Any) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "nonsense"}}}]

    async def test() -> None:
        async with client(chat_template="chatml") as c:
            body = {"model": "toy", "tools": tools} | MESSAGES
            for choice in ("required", {"type": "function", "function": {"name": "f"}}):
                with pytest.raises(openai.BadRequestError) as refused:
                    await c.api.chat.completions.create(**body, tool_choice=choice)
                assert refused.value.body["param"] == "tools"
            assert not c.engine.sent

    run(test())


def test_which_form_of_calls_is_read(run: Any, client: Any, tmp_path: Path) -> None:
    """A template that shows none needs the option; the option counts before what the template shows."""
    file = tmp_path / "own.jinja"
    file.write_text("{{ tools }}{{ messages[0].content }}")

    async def test() -> None:
        async with client(chat_template=str(file)) as c:
            error = await c.refused("/v1/chat/completions", **MESSAGES, tools=TOOLS)
            assert (error["param"], "--tool-call-parser" in error["message"]) == ("tools", True)
        async with client(chat_template=str(file), tool_call_parser="qwen25") as c:
            answer, _ = await c.chat(TEXTS["chatml"], tools=TOOLS)
            assert len(answer.choices[0].message.tool_calls) == 2

    run(test())


def test_a_template_without_a_place_for_tools_refuses_them(run: Any, client: Any, tmp_path: Path) -> None:
    file = tmp_path / "own.jinja"
    file.write_text("<tool_call> {{ messages[0].content }}")

    async def test() -> None:
        async with client(chat_template=str(file)) as c:
            error = await c.refused("/v1/chat/completions", **MESSAGES, tools=TOOLS)
            assert "no place for tools" in error["message"]

    run(test())


def test_arguments_go_back_to_the_template_as_they_came(run: Any, client: Any) -> None:
    """A conversation goes on with the message that was received."""

    async def test() -> None:
        async with client(chat_template="chatml") as c:
            answer, _ = await c.chat(TEXTS["chatml"], tools=TOOLS)
            message = answer.choices[0].message.model_dump(exclude_none=True)
            results = [
                {"role": "tool", "tool_call_id": call["id"], "content": "fine"}
                for call in message["tool_calls"]
            ]
            user = {"role": "user", "content": "Hi"}
            _, (prompt,) = await c.chat("x", messages=[user, message, *results], tools=TOOLS)
            assert TEXTS["chatml"] in prompt
            assert json.dumps(PARAMETERS) in prompt

    run(test())
