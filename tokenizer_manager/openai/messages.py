"""Messages as chat templates read them."""

from __future__ import annotations

import reprlib
from collections.abc import Sequence
from typing import Any

import msgspec

from gapless.runtime.core.errors import RequestError
from gapless.tokenizer_manager.openai.api import Message

# Between the text parts of one message, as other servers do it: templates know only text.
_BETWEEN_PARTS = "\n"


def for_template(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Each message with its content as one string and the arguments of its tool calls as objects.

    Raises RequestError for what is no text (nothing is ever fetched for it) and for arguments that are not JSON.
    """
    return [_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _message(message: Message, where: str) -> dict[str, Any]:
    role = "system" if message.role == "developer" else message.role
    made: dict[str, Any] = {"role": role, "content": _text(message.content, f"{where}.content")}
    if message.tool_calls:
        made["tool_calls"] = [
            _call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(message.tool_calls)
        ]
    made |= {
        name: value for name in ("tool_call_id", "name") if (value := getattr(message, name)) is not None
    }
    return made


def _text(content: str | Sequence[str | dict[str, Any]] | None, where: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return _BETWEEN_PARTS.join(_part(part, f"{where}[{i}]") for i, part in enumerate(content))


def _part(part: str | dict[str, Any], where: str) -> str:
    if isinstance(part, str):
        return part
    kind, text = part.get("type"), part.get("text")
    if kind != "text":
        raise RequestError(
            f"{where} is of type {reprlib.repr(kind)}; only text is supported", param=f"{where}.type"
        )
    if not isinstance(text, str):
        raise RequestError(f"{where}.text must be a string, got {reprlib.repr(text)}", param=f"{where}.text")
    return text


def _call(call: dict[str, Any], where: str) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise RequestError(f"{where}.function must have a name", param=f"{where}.function.name")
    where += ".function.arguments"
    return {**call, "function": {**function, "arguments": _arguments(function.get("arguments"), where)}}


def _arguments(arguments: Any, where: str) -> dict[str, Any]:
    """OpenAI's API has them as JSON in a string, empty where there are none."""
    if isinstance(arguments, str) and arguments:
        try:
            arguments = msgspec.json.decode(arguments)
        except (msgspec.DecodeError, RecursionError) as error:
            raise RequestError(f"{where} is not valid JSON: {error}", param=where) from error
    if not isinstance(arguments or {}, dict):
        raise RequestError(f"{where} must be a JSON object", param=where)
    return arguments or {}
