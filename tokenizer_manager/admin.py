"""Routes that act on what other requests share."""

from __future__ import annotations

import asyncio
import dataclasses
import math
import reprlib

from starlette.requests import Request
from starlette.responses import Response

from gapless.runtime.core.errors import AbortedError, RequestError
from gapless.tokenizer_manager.api import (
    AbortAnswer,
    AbortBody,
    FlushAnswer,
    UpdateWeightsAnswer,
    UpdateWeightsBody,
)
from gapless.tokenizer_manager.fields import read_body
from gapless.tokenizer_manager.front import Front
from gapless.tokenizer_manager.keys import Keys
from gapless.tokenizer_manager.responses import json_response
from gapless.tokenizer_manager.routes import RouteSpec
from gapless.tokenizer_manager.serving import until_disconnect

MAX_WAIT_SECONDS = 3600  # for the server to come to rest


class BusyError(RequestError):
    status = 409
    code = "busy"


def routes(front: Front) -> list[RouteSpec]:
    admin = _Admin(front)
    return [
        RouteSpec(
            "/abort_request",
            admin.abort_request,
            ("POST",),
            summary="End one request, or with the admin key all of them, by finish_reason abort",
            body=AbortBody,
            answer=AbortAnswer,
        ),
        RouteSpec(
            "/flush_cache",
            admin.flush_cache,
            ("GET", "POST"),
            admin=True,
            summary="Empty the prefix cache",
            query=("timeout",),
            answer=FlushAnswer,
        ),
        RouteSpec(
            "/update_weights_from_disk",
            admin.update_weights,
            ("POST",),
            admin=True,
            summary="Let open requests end, load other weights of the same shape and forget all prefixes",
            body=UpdateWeightsBody,
            answer=UpdateWeightsAnswer,
        ),
    ]


class _Admin:
    def __init__(self, front: Front) -> None:
        self._front = front
        self._keys = Keys(front.config)

    async def abort_request(self, request: Request) -> Response:
        """An id that nobody has is no error: its request may just have ended."""
        config, registry = self._front.config, self._front.registry
        body = await read_body(request, self._front.body_room, AbortBody, strict=config.strict_fields)
        if body.abort_all:
            self._keys.check_admin(request.scope)
            return json_response({"aborted": registry.abort_all()})
        if not body.rid:  # to SGLang's clients, who send it beside abort_all, an empty one is none
            raise RequestError("rid or abort_all is needed", param="rid")
        return json_response({"aborted": registry.abort_named(body.rid)})

    async def update_weights(self, request: Request) -> Response:
        """New requests get 503 until it is done. A client that goes does not stop it."""
        config = self._front.config
        body = await read_body(request, self._front.body_room, UpdateWeightsBody, strict=config.strict_fields)
        updating = asyncio.ensure_future(self._front.update_weights(body.model_path, body.timeout))
        result = await asyncio.shield(updating)
        if not result:
            raise BusyError(result.message)
        return json_response({"success": True, "message": f"the weights of {body.model_path} are in use"})

    async def flush_cache(self, request: Request) -> Response:
        """`timeout` in the query: seconds to wait for requests to end. A client that goes flushes nothing later."""
        timeout = _seconds(request.query_params.get("timeout") or "0", "timeout")
        flushing = asyncio.ensure_future(self._front.flush_cache(timeout))
        gone = asyncio.ensure_future(until_disconnect(request.receive))
        try:
            await asyncio.wait({flushing, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not flushing.done():
                raise AbortedError("the client has gone")
            result = flushing.result()
        finally:
            flushing.cancel()
            gone.cancel()
        if not result:
            raise BusyError(result.message)
        return json_response(dataclasses.asdict(result))


def _seconds(text: str, param: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds <= MAX_WAIT_SECONDS:
        raise RequestError(
            f"{param} must be a number of seconds from 0 to {MAX_WAIT_SECONDS}, got {reprlib.repr(text)}",
            param=param,
        )
    return seconds
