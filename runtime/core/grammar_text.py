"""All that can constrain an output in one form: a Lark grammar in llguidance's dialect."""

from __future__ import annotations

import re
from typing import Any

import msgspec

from gapless.runtime.core.gbnf import gbnf_to_lark

# Forcing would leave only the one token that some tokenizer gives for a text; without it, each that fits may come.
_FOOTER = '\n%llguidance {"no_forcing": true}\n'
_IS_LARK = re.compile(r"^\s*(?:start(?:\.-?\d+)?\s*:|%llguidance\b)", re.MULTILINE)
# Between JSON's tokens there may be one space: weak models write blanks until the limit where they may.
JSON_OPTIONS: dict[str, Any] = {"whitespace_pattern": " "}


def to_lark(kind: str, text: str) -> str:
    """The grammar that `text` stands for; `kind` is the field of SamplingParams that it came in.

    Raises ValueError where it cannot be read. What it says is for llguidance to check.
    """
    match kind:
        case "json_schema":
            return f"start: %json {_with_options(text)}{_FOOTER}"
        case "regex":
            return f"start: /{_in_slashes(text)}/{_FOOTER}"
        case _:
            return (text if _IS_LARK.search(text) else gbnf_to_lark(text)) + _FOOTER


def _with_options(text: str) -> str:
    """The schema, with our whitespace where it does not bring its own (`x-guidance`)."""
    try:
        schema = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ValueError(f"it is not valid JSON: {error}") from error
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        raise ValueError("a JSON schema is an object")
    given = schema.get("x-guidance")
    options = JSON_OPTIONS | given if isinstance(given, dict) else JSON_OPTIONS
    return msgspec.json.encode(schema | {"x-guidance": options}).decode()


def _in_slashes(regex: str) -> str:
    """For a place between slashes on one line."""
    escaped = re.sub(r"\\(.)|([/\n])", _escape, regex, flags=re.DOTALL)
    return escaped or "(?:)"


def _escape(match: re.Match[str]) -> str:
    char = match[1] or match[2]
    if char == "\n":
        return "\\n"
    return match[0] if match[1] else "\\/"
