"""How every route that generates serves a request: one way in, one way to end.

A stream's headers go out with its first tokens: whatever fails before is a real HTTP status, so that a router can
send the request elsewhere. What fails later is an event in that sample's place; the stream ends with `[DONE]` in any
case.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import orjson
from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive, Scope, Send

from gapless.runtime.core.errors import GaplessError, RequestError
from gapless.tokenizer_manager.body import Body
from gapless.tokenizer_manager.front import Front
from gapless.tokenizer_manager.schema import GenerateRequest
from gapless.tokenizer_manager.states import Call, RequestState

_EVENT_STREAM = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
_DONE = b"data: [DONE]\n\n"


class Form(Protocol):
    """What a body asked for, and the form in which its route answers. Values are JSON's, `events` one each."""

    @property
    def request(self) -> GenerateRequest: ...

    def answer(self, states: Sequence[RequestState]) -> Any:
        """The whole answer, once all `states` have ended without an error."""

    def events(self, state: RequestState) -> list[Any]:
        """What the stream says of a state that has changed and has no error."""

    def failed(self, state: RequestState, error: GaplessError) -> Any:
        """The event that ends a state with an error."""

    def last_events(self, states: Sequence[RequestState]) -> list[Any]:
        """What comes when all have ended."""


class Generating:
    """An ASGI application: `parse` makes the form of a body, or raises RequestError.

    `renamed` puts such errors in the words of the route's own fields.
    """

    def __init__(
        self,
        front: Front,
        parse: Callable[[bytearray], Awaitable[Form]],
        renamed: Callable[[RequestError], RequestError] = lambda error: error,
    ) -> None:
        self._front, self._parse, self._renamed = front, parse, renamed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._front.check_healthy()
        body = Body(self._front.body_room)
        try:
            form = await self._parse(await body.read(Request(scope, receive)))
            await self._serve(form, body, receive, send)
        except ClientDisconnect:
            return
        except RequestError as error:
            raise self._renamed(error) from error
        finally:
            body.drop()

    async def _serve(self, form: Form, body: Body, receive: Receive, send: Send) -> None:
        front, request = self._front, form.request
        front.check_healthy()  # the body may have taken its time
        interval = front.config.stream_interval if request.stream else 0
        call = front.registry.open(request.prompts, interval, request.timeout)
        with self._aborted_with_client(call, receive):
            await front.submit(call, request.prompts)
            request.prompts.clear()  # an answer may take long
            body.drop()
            await (_stream if request.stream else _answer)(form, call, send)

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


async def _answer(form: Form, call: Call, send: Send) -> None:
    open_states = len(call.states)
    while open_states:
        changed = await call.changed()
        if not changed:
            return
        for state in changed:
            if (error := state.error()) is not None:
                raise error
        open_states -= len(changed)
    content = orjson.dumps(form.answer(call.states))
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(content))]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": content})


async def _stream(form: Form, call: Call, send: Send) -> None:
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
        events = [event for state in changed for event in _events(form, state)]
        body = b"".join(map(_sse, events))
        if not open_states:
            body += b"".join(map(_sse, form.last_events(call.states))) + _DONE
        if body:
            await send({"type": "http.response.body", "body": body, "more_body": bool(open_states)})


def _events(form: Form, state: RequestState) -> list[Any]:
    error = state.error()
    return form.events(state) if error is None else [form.failed(state, error)]


def _sse(event: Any) -> bytes:
    return b"data: " + orjson.dumps(event) + b"\n\n"


async def until_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
