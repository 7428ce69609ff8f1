"""POST /generate: one JSON answer, or server-sent events.

A stream's headers go out with its first tokens: whatever fails before is a real HTTP status, so that a router can
send the request elsewhere. What fails later is an event `{"error": ...}` in that sample's place; the stream ends
with `[DONE]` in any case.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

import orjson
from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive, Scope, Send

from gapless.tokenizer_manager.answer import next_chunk, whole_answer
from gapless.tokenizer_manager.api import GenerateAnswer, GenerateBody
from gapless.tokenizer_manager.body import Body
from gapless.tokenizer_manager.front import Front
from gapless.tokenizer_manager.routes import RouteSpec
from gapless.tokenizer_manager.schema import GenerateRequest, parse_generate
from gapless.tokenizer_manager.states import Call, RequestState

_EVENT_STREAM = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
_DONE = b"data: [DONE]\n\n"


def routes(front: Front) -> list[RouteSpec]:
    return [
        RouteSpec(
            "/generate",
            Generate(front),
            ("POST",),
            summary="Continue prompts; with stream, server-sent events of cumulative answers, then [DONE]",
            body=GenerateBody,
            answer=GenerateAnswer | list[GenerateAnswer],
            streams=True,
        )
    ]


class Generate:
    """The route as an ASGI application."""

    def __init__(self, front: Front) -> None:
        self._front = front
        self._incremental = front.config.incremental_streaming_output

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._front.check_healthy()
        body = Body(self._front.body_room)
        try:
            request = parse_generate(await body.read(Request(scope, receive)), self._front.config)
            await self._serve(request, body, receive, send)
        except ClientDisconnect:
            return
        finally:
            body.drop()

    async def _serve(self, request: GenerateRequest, body: Body, receive: Receive, send: Send) -> None:
        front = self._front
        front.check_healthy()  # the body may have taken its time
        interval = front.config.stream_interval if request.stream else 0
        call = front.registry.open(request.prompts, interval, request.timeout)
        with self._aborted_with_client(call, receive):
            await front.submit(call, request.prompts)
            request.prompts.clear()  # an answer may take long
            body.drop()
            if request.stream:
                await self._stream(call, request.is_list, send)
            else:
                await self._answer(call, request.is_list, send)

    @contextmanager
    def _aborted_with_client(self, call: Call, receive: Receive) -> Iterator[None]:
        """Aborts what still runs when the client goes, also in the middle of a write, and when the handler ends."""
        watch = asyncio.create_task(until_disconnect(receive))
        watch.add_done_callback(lambda _: self._front.registry.abort(call))
        try:
            yield
        finally:
            watch.cancel()
            self._front.registry.close(call)

    async def _answer(self, call: Call, is_list: bool, send: Send) -> None:
        open_states = len(call.states)
        while open_states:
            changed = await call.changed()
            if not changed:
                return
            for state in changed:
                if (error := state.error()) is not None:
                    raise error
            open_states -= len(changed)
        answers = [whole_answer(state) for state in call.states]
        content = orjson.dumps(answers if is_list else answers[0])
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(content))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": content})

    async def _stream(self, call: Call, is_list: bool, send: Send) -> None:
        started, open_states = False, len(call.states)
        while open_states:
            changed = await call.changed()
            if not changed:
                return
            if not started:
                for state in changed:
                    if (error := state.error()) is not None:
                        raise error
                await send({"type": "http.response.start", "status": 200, "headers": _EVENT_STREAM})
                started = True
            open_states -= sum(state.finished is not None for state in changed)
            events = b"".join(self._event(state, is_list) for state in changed)
            body = events if open_states else events + _DONE
            await send({"type": "http.response.body", "body": body, "more_body": bool(open_states)})

    def _event(self, state: RequestState, is_list: bool) -> bytes:
        error = state.error()
        event = next_chunk(state, self._incremental) if error is None else error.body()
        if is_list:
            event["index"] = state.index
        return b"data: " + orjson.dumps(event) + b"\n\n"


async def until_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
