"""What a chat request may do with its tools: how calls are read, and what the output is kept to."""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import msgspec

from gapless.runtime.core.errors import RequestError
from gapless.tokenizer_manager.openai.api import ChatBody, NamedTool, Tool
from gapless.tokenizer_manager.openai.tool_forced import (
    MAX_CALLS,
    ListParser,
    NamedParser,
    arguments_schema,
    list_schema,
)
from gapless.tokenizer_manager.openai.tool_hermes import HermesParser
from gapless.tokenizer_manager.openai.tool_llama3 import Llama3Parser
from gapless.tokenizer_manager.openai.tool_mistral import MistralParser
from gapless.tokenizer_manager.openai.tool_parser import ToolParser

PARSERS: dict[str, type[ToolParser]] = {
    "hermes": HermesParser,
    "llama3": Llama3Parser,
    "mistral": MistralParser,
    "qwen25": HermesParser,
}


@dataclass(frozen=True, slots=True)
class ToolUse:
    """`tools` are shown to the model, in the API's form; `schema` is what its output must match, in JSON."""

    tools: list[dict[str, Any]]
    parser: Callable[[], ToolParser]  # a new one for each output
    schema: str | None = None


def tool_use(body: ChatBody, form: str | None) -> ToolUse | None:
    """None where the model may not call tools; `form` is how it calls them, None where that is not known.

    Raises RequestError for a choice that is not possible.
    """
    tools, choice = body.tools or [], body.tool_choice
    if not tools and (choice == "required" or isinstance(choice, NamedTool)):
        raise RequestError("tool_choice asks for a tool, and tools has none", param="tool_choice")
    if not tools or choice == "none":
        return None
    names = [tool.function.name for tool in tools]
    if len(set(names)) < len(names):
        raise RequestError("tools has two functions of one name", param="tools")
    for field in ("response_format", "regex", "ebnf"):
        value = getattr(body, field)
        if value is not None and getattr(value, "type", "") != "text":
            raise RequestError(f"{field} is not supported together with tools", param=field)
    shown = [_shown(tool) for tool in tools]
    if isinstance(choice, NamedTool):
        tool = next((tool for tool in tools if tool.function.name == choice.function.name), None)
        if tool is None:
            wanted = reprlib.repr(choice.function.name)
            raise RequestError(f"tool_choice names {wanted}, which tools does not have", param="tool_choice")
        return ToolUse(shown, _of(NamedParser, [tool.function.name]), _text(arguments_schema(tool)))
    if choice == "required":
        most = 1 if body.parallel_tool_calls is False else MAX_CALLS
        return ToolUse(shown, _of(ListParser, names), _text(list_schema(tools, most)))
    if form is None:
        raise RequestError(
            "tools need --tool-call-parser: the chat template does not show how the model calls them",
            param="tools",
        )
    return ToolUse(shown, _of(PARSERS[form], names))


def _of(parser: type[ToolParser], names: Collection[str]) -> Callable[[], ToolParser]:
    return lambda: parser(names)


def _shown(tool: Tool) -> dict[str, Any]:
    function = {
        name: value
        for name in ("name", "description", "parameters")
        if (value := getattr(tool.function, name)) is not None
    }
    return {"type": "function", "function": function}


def _text(schema: dict[str, Any]) -> str:
    return msgspec.json.encode(schema).decode()
