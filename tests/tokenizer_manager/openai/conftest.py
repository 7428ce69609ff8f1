"""The openai client over the real HTTP server and an engine that answers when told."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import openai
import pytest

from gapless.runtime.core.messages import Finish, Submit, int32s
from gapless.runtime.tokenizer.byte_tokenizer import ByteTokenizer


class Client:
    """`api` is the client; the engine is told what each request gains."""

    def __init__(self, api: openai.AsyncOpenAI, service: Any) -> None:
        self.api, self.service, self.engine = api, service, service.engine

    async def prompt(self) -> tuple[int, str, Submit]:
        """(uid, text, all) of the next request that reaches the engine."""
        submit = await self.engine.take(Submit)
        return submit.uid, ByteTokenizer().decode(int32s(submit.input_ids).tolist()), submit

    async def complete(self, *texts: str, finish: Finish = Finish.STOP_TOKEN, **body: Any) -> tuple[Any, Any]:
        """(answer to a completion, its prompts): each prompt gains one of `texts`."""
        return await self._answered(self.api.completions.create(**{"model": "toy"} | body), texts, finish)

    async def chat(self, *texts: str, finish: Finish = Finish.STOP_TOKEN, **body: Any) -> tuple[Any, Any]:
        """(answer to a chat, its prompts): each sample gains one of `texts`."""
        return await self._answered(self.api.chat.completions.create(**chat_body(body)), texts, finish)

    async def _answered(self, call: Any, texts: Sequence[str], finish: Finish) -> tuple[Any, Any]:
        task = asyncio.create_task(call)
        prompts = []
        for text in texts:
            uid, prompt, _ = await self.prompt()
            prompts.append(prompt)
            self.engine.gain(uid, text, list(text.encode()), finish)
        return await task, prompts

    async def refused(self, path: str, status: int = 400, **body: Any) -> dict[str, Any]:
        """The error of a request that must not reach the engine."""
        response = await self.service.client.post(path, json=body)
        assert response.status_code == status, response.text
        assert not self.engine.sent
        (error,) = response.json().values()
        assert set(error) == {"message", "type", "param", "code"}
        return dict(error)

    async def streamed(
        self, pieces: Sequence[str], finish: Finish = Finish.STOP_TOKEN, **body: Any
    ) -> list[Any]:
        """The chunks of a streamed chat whose text comes in `pieces`."""
        task = asyncio.create_task(self.api.chat.completions.create(**chat_body(body), stream=True))
        uid, _, _ = await self.prompt()
        self.engine.gain(uid, pieces[0], [0])  # the headers go out with the first ids
        stream = await task
        for piece in pieces[1:]:
            self.engine.gain(uid, piece, [1])
        self.engine.gain(uid, "", [2], finish)
        return [chunk async for chunk in stream]


def chat_body(body: dict[str, Any]) -> dict[str, Any]:
    return {"model": "toy", "messages": [{"role": "user", "content": "Hi"}]} | body


@pytest.fixture
def client(on_a_socket: Any) -> Callable[..., Any]:
    @asynccontextmanager
    async def make(**options: Any) -> AsyncIterator[Client]:
        async with on_a_socket(**options) as service:
            ready = service.front.ready
            service.front.handle(
                msgspec.structs.replace(
                    ready, context_length=9000, max_prompt_tokens=8000, max_total_tokens=9000
                )
            )
            base_url = f"http://127.0.0.1:{service.port}/v1"
            async with openai.AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0) as api:
                yield Client(api, service)

    return make
