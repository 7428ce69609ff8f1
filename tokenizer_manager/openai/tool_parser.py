"""Tool calls in a model's text.

A parser is fed text in any pieces and gives the same items whatever the pieces are: it decides by what has come since
the last item, never by where a piece ends. A call is an item once it is complete: its arguments are valid JSON, then.
What is no call, or was cut off within one, is text.
"""

from __future__ import annotations

import uuid
from abc import ABC, abstractmethod
from collections.abc import Collection
from dataclasses import dataclass

import msgspec

SPACE = " \t\r\n"


@dataclass(frozen=True, slots=True)
class Call:
    """`arguments` is a JSON object."""

    name: str
    arguments: str


Item = str | Call


class ToolParser(ABC):
    """One output's parser; `names` are the tools there are. An unknown name is no call."""

    needs_special_tokens = False  # the marks are tokens that skip_special_tokens would hide

    def __init__(self, names: Collection[str]) -> None:
        self.names = names

    @abstractmethod
    def push(self, text: str) -> list[Item]:
        """The items that `text` completes."""

    @abstractmethod
    def finish(self) -> list[Item]:
        """The rest, at the end of the output."""

    def new_id(self) -> str:
        """An id for a call, of the form that the model's template takes."""
        return f"call_{uuid.uuid4().hex[:24]}"


_NOTHING = msgspec.Raw(b"null")


class _Call(msgspec.Struct):
    name: str
    arguments: msgspec.Raw = _NOTHING
    parameters: msgspec.Raw = _NOTHING


def read_call(text: str, names: Collection[str]) -> Call | None:
    """The call that a JSON object stands for: its name, and its arguments as an object or as a string of one."""
    try:
        call = msgspec.json.decode(text, type=_Call)
    except (msgspec.DecodeError, RecursionError, UnicodeEncodeError):
        return None
    raw = bytes(call.parameters if bytes(call.arguments) == b"null" else call.arguments)
    arguments = read_arguments("{}" if raw == b"null" else raw.decode())
    return None if arguments is None or call.name not in names else Call(call.name, arguments)


def read_arguments(text: str) -> str | None:
    """`text` where it is a JSON object, or the content of the string that it is; None for anything else."""
    try:
        value = msgspec.json.decode(text)
        if isinstance(value, str):
            text = value
            value = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError, UnicodeEncodeError):
        return None
    return text.strip(SPACE) if isinstance(value, dict) else None


class ObjectScanner:
    """Finds the end of a JSON object that comes in pieces, by its braces. What it holds is checked afterwards."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._escaped = False

    def end(self, text: str, start: int) -> int:
        """Just behind the object's end, or -1; reads `text` from `start`, which must go on where it last ended."""
        for i in range(start, len(text)):
            char = text[i]
            if self._escaped:
                self._escaped = False
            elif self._in_string:
                self._escaped = char == "\\"
                self._in_string = char != '"'
            elif char == '"':
                self._in_string = True
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
                if self._depth <= 0:
                    return i + 1
        return -1


def overlap(text: str, mark: str) -> int:
    """Length of the longest end of `text` that begins `mark`, without being all of it."""
    for size in range(min(len(mark) - 1, len(text)), 0, -1):
        if text.endswith(mark[:size]):
            return size
    return 0
