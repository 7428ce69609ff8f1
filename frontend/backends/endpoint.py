"""A server over HTTP: ours, or SGLang's."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing, suppress
from typing import Any

from gapless.frontend.backends.base import BackendError, Message
from gapless.frontend.backends.http import JsonClient
from gapless.frontend.backends.native import Fields, NativeBackend
from gapless.frontend.backends.roles import Turn
from gapless.frontend.backends.templates import format_of_model


class RuntimeEndpoint(NativeBackend):
    """What SGLang's server has no route for, it does without: groups are not released, and roles are written in the
    format that the model's path tells, or that `chat_template` names (chatml, llama-3, gemma, mistral).

    `timeout` in seconds, for a whole call. Raises ValueError where the URL or the format is none.
    """

    def __init__(
        self,
        url: str,
        api_key: str | None = None,
        chat_template: str | None = None,
        timeout: float | None = None,
    ) -> None:
        super().__init__(chat_template)
        self.url = url
        self._http = JsonClient(url, api_key, timeout)
        self._missing: set[str] = set()  # routes that the server does not have
        self._increments: bool | None = None  # whether streams bring what is new; None: not asked yet

    async def role_text(self, before: Sequence[Message], role: str) -> Turn:
        try:
            return await super().role_text(before, role)
        except _MissingError:
            self._format = format_of_model((await self._http.call("GET", "/get_model_info"))["model_path"])
        return await super().role_text(before, role)

    async def release(self, group: str) -> None:
        with suppress(_MissingError):
            await self._optional("/release_group", {"group_id": group})

    async def close(self) -> None:
        await self._http.close()

    async def _call(self, fields: Fields) -> Any:
        return await self._http.call("POST", "/generate", fields)

    async def _events(self, fields: Fields) -> AsyncGenerator[Any, None]:
        if self._increments is None:
            info = await self._http.call("GET", "/get_server_info")
            self._increments = bool(info.get("incremental_streaming_output"))
        async with aclosing(self._http.events("/generate", fields)) as events:
            async for event in events:
                yield event

    def _is_increment(self, event: Any) -> bool:
        return bool(self._increments)

    async def _tokenize(
        self, texts: Sequence[str], add_special_tokens: bool = True
    ) -> list[list[int]] | None:
        body = {"prompt": texts, "add_special_tokens": add_special_tokens}
        try:
            tokens: list[list[int]] = (await self._optional("/tokenize", body))["tokens"]
        except _MissingError:
            return None
        return tokens

    async def _render(self, messages: list[dict[str, str]], add_generation_prompt: bool) -> str:
        body = {"messages": messages, "add_generation_prompt": add_generation_prompt}
        text: str = (await self._optional("/apply_chat_template", body))["text"]
        return text

    async def _optional(self, path: str, body: Fields) -> Any:
        """The answer of a route that not every server has; raises _MissingError."""
        if path not in self._missing:
            try:
                return await self._http.call("POST", path, body)
            except BackendError as error:
                if error.status != 404:
                    raise
                self._missing.add(path)
        raise _MissingError(f"{self.url} has no {path}", 404)


class _MissingError(BackendError):
    """The server has no such route."""
