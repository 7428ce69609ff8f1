"""Tool calls that a grammar has kept the output to: no marks, nothing but JSON."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from gapless.tokenizer_manager.openai.api import Tool
from gapless.tokenizer_manager.openai.tool_marks import MarkedParser
from gapless.tokenizer_manager.openai.tool_parser import SPACE, Call, Item, ToolParser, read_arguments

MAX_CALLS = 16  # a weak model might go on without end
_ANY_OBJECT: dict[str, Any] = {"type": "object"}


class ListParser(MarkedParser):
    """For tool_choice required: a list of calls."""

    before = SPACE + "["
    between = SPACE + ","
    closer = "]"
    starts_open = True


class NamedParser(ToolParser):
    """For a named tool: the output is its arguments."""

    def __init__(self, names: Collection[str]) -> None:
        super().__init__(names)
        (self._name,) = names
        self._parts: list[str] = []

    def push(self, text: str) -> list[Item]:
        self._parts.append(text)
        return []

    def finish(self) -> list[Item]:
        text = "".join(self._parts)
        arguments = read_arguments(text)
        if arguments is not None:
            return [Call(self._name, arguments)]
        return [text] if text else []


def arguments_schema(tool: Tool) -> dict[str, Any]:
    """The schema of the tool's arguments, which are an object."""
    return _ANY_OBJECT | (tool.function.parameters or {})


def list_schema(tools: Sequence[Tool], most: int) -> dict[str, Any]:
    """The schema of a list of 1 to `most` calls of the tools."""
    calls = [_call_schema(tool, f"#/items/anyOf/{i}/properties/arguments") for i, tool in enumerate(tools)]
    return {"type": "array", "minItems": 1, "maxItems": most, "items": {"anyOf": calls}}


def _call_schema(tool: Tool, place: str) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {
            "name": {"const": tool.function.name},
            "arguments": _moved(arguments_schema(tool), place),
        },
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }


def _moved(schema: Any, place: str) -> Any:
    """A schema whose root has become `place`: references within it begin there."""
    if isinstance(schema, list):
        return [_moved(item, place) for item in schema]
    if not isinstance(schema, dict):
        return schema
    moved = {name: _moved(value, place) for name, value in schema.items()}
    ref = schema.get("$ref")
    if isinstance(ref, str) and ref.startswith("#"):
        moved["$ref"] = place + ref[1:]
    return moved
