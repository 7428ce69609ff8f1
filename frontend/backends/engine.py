"""A `gapless.Engine` in this process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Sequence
from typing import Any, TypeVar

from gapless import Engine
from gapless.frontend.backends.base import BackendError
from gapless.frontend.backends.native import Fields, NativeBackend

T = TypeVar("T")


class EngineBackend(NativeBackend):
    """The engine stays the caller's: `close` does not end it.

    `chat_template` names a chat format (chatml, llama-3, gemma, mistral) to be used in place of the model's template.
    """

    def __init__(self, engine: Engine, *, chat_template: str | None = None) -> None:
        super().__init__(chat_template)
        self._engine = engine

    async def release(self, group: str) -> None:
        await _asked(self._engine.async_release_group(group))

    async def close(self) -> None:
        pass

    async def _call(self, fields: Fields) -> Any:
        return await _asked(self._engine.async_generate(**_arguments(fields)))

    async def _events(self, fields: Fields) -> AsyncGenerator[Any, None]:
        # Shielded: a stream that opens while this is cancelled is dropped, and so aborted, when it has opened.
        stream = await asyncio.shield(asyncio.create_task(self._call(fields)))
        try:
            while (event := await _asked(anext(stream, None))) is not None:
                yield event
        finally:
            stream.close()

    def _is_increment(self, event: Any) -> bool:
        return bool(len(event["output_ids"]) < event["meta_info"]["completion_tokens"])

    async def _tokenize(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]:
        encode = self._engine.async_tokenize
        return await _asked(asyncio.gather(*(encode(text, add_special_tokens) for text in texts)))

    async def _render(self, messages: list[dict[str, str]], add_generation_prompt: bool) -> str:
        return await _asked(self._engine.async_apply_chat_template(messages, add_generation_prompt))


def _arguments(fields: Fields) -> dict[str, Any]:
    """/generate's fields by the names of the engine's parameters."""
    return {"prompt" if name == "text" else name: value for name, value in fields.items()}


async def _asked(call: Awaitable[T]) -> T:
    """What the engine answers. Its errors carry the HTTP status that a server would answer with."""
    try:
        return await call
    except Exception as error:
        raise BackendError(str(error), getattr(error, "status", None)) from error
