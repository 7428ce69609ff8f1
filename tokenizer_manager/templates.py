"""The chat template of the model that is served, and prompts made by it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from gapless.runtime.core.config import ServerConfig
from gapless.runtime.core.errors import RequestError, UnavailableError
from gapless.runtime.tokenizer.base import Tokenizer
from gapless.runtime.tokenizer.chat_template import (
    ChatTemplate,
    TemplateError,
    chat_template,
    read_template,
    tool_format,
)
from gapless.runtime.tokenizer.chat_template_process import Renderer


class Templates:
    """Prompts are rendered one after the other, beside the event loop, in a process that starts with the first."""

    def __init__(self, config: ServerConfig, tokenizer: Callable[[], Tokenizer | None]) -> None:
        """`tokenizer` gives the model's, None while that is loading. ConfigError: --chat-template cannot be read."""
        self._tool_call_parser, self._tokenizer = config.tool_call_parser, tokenizer
        self._given = read_template(config.chat_template)
        self._renderer: Renderer | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="gapless-template")

    def tool_format(self) -> str | None:
        """How the model calls tools, a name of --tool-call-parser; None where neither that nor the template says."""
        named = self._tool_call_parser
        return tool_format(self._loaded().template.source) if named == "auto" else named

    async def render(self, variables: Mapping[str, Any]) -> str:
        """Raises RequestError with what the template says."""
        renderer = self._loaded()
        if variables.get("tools") and "tools" not in renderer.template.source:
            raise RequestError("the chat template has no place for tools", param="tools")
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, renderer.render, variables)
        except TemplateError as error:
            raise RequestError(f"chat template: {error}", param="messages") from error

    def close(self) -> None:
        """Ends the process, once a prompt that it is at work on is done."""
        self._thread.shutdown(wait=False)
        self._renderer = None

    def _loaded(self) -> Renderer:
        if self._renderer is None:
            self._renderer = Renderer(self._template())
        return self._renderer

    def _template(self) -> ChatTemplate:
        if (tokenizer := self._tokenizer()) is None:
            raise UnavailableError("the model is loading")
        template = chat_template(self._given, tokenizer)
        if template is None:
            raise RequestError("the model has no chat template: give one by --chat-template")
        return template
