"""Chat templates in Jinja's immutable sandbox, with the names that transformers gives them."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from gapless.runtime.tokenizer.chat_template import ChatTemplate, TemplateError

MAX_PROMPT_CHARS = 1 << 24


class Rendering:
    """A compiled template. It bounds nothing by itself: a template may run for ever, or fill the memory."""

    def __init__(self, template: ChatTemplate) -> None:
        """Raises TemplateError where the source is not Jinja."""
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation]
        )
        environment.filters["tojson"] = _to_json
        environment.globals |= {"raise_exception": _raise, "strftime_now": _strftime_now}
        self._special_tokens = template.special_tokens
        try:
            self._template = environment.from_string(template.source)
        except (jinja2.TemplateError, RecursionError) as error:
            raise TemplateError(f"it cannot be read: {error}") from error

    def render(self, variables: Mapping[str, Any]) -> str:
        """The prompt; raises TemplateError."""
        try:
            text = self._template.render({**self._special_tokens, **variables})
        except jinja2.TemplateError as error:
            raise TemplateError(error.message or type(error).__name__) from error
        except Exception as error:  # a template can make any
            raise TemplateError(f"{type(error).__name__}: {error}".removesuffix(": ")) from error
        if len(text) > MAX_PROMPT_CHARS:
            raise TemplateError(f"the prompt is longer than {MAX_PROMPT_CHARS} characters")
        return text


class _Generation(Extension):
    """{% generation %} marks what a model has said, for training; here its content counts alone."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter writes for HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)
