"""Which chat template counts: the one of --chat-template, else the model's own."""

from __future__ import annotations

from pathlib import Path

import msgspec

from gapless.runtime.core.errors import ConfigError
from gapless.runtime.tokenizer.base import Tokenizer
from gapless.runtime.tokenizer.chat_template_builtin import BUILTIN

MAX_TEMPLATE_CHARS = 1 << 20


class TemplateError(ValueError):
    """The template cannot be used, or refuses what it was given, in its own words."""


class ChatTemplate(msgspec.Struct, frozen=True):
    """Jinja source, and the tokens that it may name (`bos_token`, ...)."""

    source: str
    special_tokens: dict[str, str] = {}


def read_template(option: str) -> str | None:
    """The template that `option` names, a built-in one or a file; None where it is empty.

    Raises ConfigError where the file cannot be read.
    """
    if option in BUILTIN:
        return BUILTIN[option]
    if not option:
        return None
    try:
        source = Path(option).expanduser().read_text()
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "not a text"
        raise ConfigError(f"--chat-template {option}: {why}", param="chat_template") from error
    if len(source) > MAX_TEMPLATE_CHARS:
        raise ConfigError(f"--chat-template {option}: longer than {MAX_TEMPLATE_CHARS} characters")
    return source


def chat_template(given: str | None, tokenizer: Tokenizer) -> ChatTemplate | None:
    """The `given` template, else the tokenizer's own; None where there is neither."""
    source = tokenizer.chat_template if given is None else given
    return None if source is None else ChatTemplate(source, dict(tokenizer.special_tokens))


def tool_format(source: str) -> str | None:
    """The form of tool calls that a template teaches (a name of --tool-call-parser), seen from its marks."""
    for mark, name in (
        ("[TOOL_CALLS]", "mistral"),
        ("<tool_call>", "hermes"),
        ("<|start_header_id|>", "llama3"),
    ):
        if mark in source:
            return name
    return None
