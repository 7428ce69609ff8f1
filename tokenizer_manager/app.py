"""The HTTP application: routes, and one shape for every error."""

from __future__ import annotations

import asyncio
import dataclasses
import math
import reprlib
from typing import Any

import orjson
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

import gapless
from gapless.runtime.core.errors import (
    AbortedError,
    GaplessError,
    InternalError,
    NotFoundError,
    RequestError,
    TooLargeError,
)
from gapless.tokenizer_manager.front import Front
from gapless.tokenizer_manager.generate import Generate, until_disconnect

MAX_WAIT_SECONDS = 3600  # for the server to come to rest


class BusyError(RequestError):
    status = 409
    code = "busy"


class MethodNotAllowedError(RequestError):
    status = 405
    code = "method_not_allowed"


def create_app(front: Front) -> Starlette:
    """The application over `front`; it holds no state of its own."""
    info = _Info(front)
    app = Starlette(
        routes=[
            Route("/generate", Generate(front), methods=["POST"]),
            Route("/flush_cache", _Cache(front).flush, methods=["GET", "POST"]),
            Route("/health", info.health),
            Route("/model_info", info.model_info),
            Route("/get_model_info", info.model_info),
            Route("/server_info", info.server_info),
            Route("/get_server_info", info.server_info),
        ],
        exception_handlers={kind: _Errors(front) for kind in (GaplessError, HTTPException, Exception)},
    )
    app.router.redirect_slashes = False
    return app


class _Cache:
    def __init__(self, front: Front) -> None:
        self._front = front

    async def flush(self, request: Request) -> Response:
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
        return _json(dataclasses.asdict(result))


class _Info:
    def __init__(self, front: Front) -> None:
        self._front = front

    async def health(self, request: Request) -> Response:
        health = self._front.health()
        return _json(health, 200 if health["status"] == "ok" else 503)

    async def model_info(self, request: Request) -> Response:
        config, ready = self._front.config, self._front.ready
        return _json(
            {
                "model_path": config.model_path,
                "tokenizer_path": config.model_path,
                "served_model_name": config.model_name,
                "is_generation": True,
                "max_context_length": ready.context_length if ready else config.context_length,
                "vocab_size": ready.vocab_size if ready else 0,
            }
        )

    async def server_info(self, request: Request) -> Response:
        """The options, then what loading the model has decided in their place."""
        front = self._front
        info: dict[str, Any] = front.config.public() | {
            "served_model_name": front.config.model_name,
            "version": gapless.__version__,
            "status": front.health()["status"],
            "tp_size": 1,
            "dp_size": 1,
            "live_requests": len(front.registry),
            "running": front.heartbeat.running,
            "waiting": front.heartbeat.waiting,
            "used_tokens": front.heartbeat.used_tokens,
            "idle_violations": front.heartbeat.violations,
        }
        if (ready := front.ready) is not None:
            info |= ready.info | {
                "vocab_size": ready.vocab_size,
                "context_length": ready.context_length,
                "max_total_tokens": ready.max_total_tokens,
                "max_prompt_tokens": ready.max_prompt_tokens,
                "load_seconds": ready.load_seconds,
            }
        return _json(info)


class _Errors:
    """Any exception as a response. One that is not ours is a defect, which uvicorn logs."""

    def __init__(self, front: Front) -> None:
        self._front = front

    async def __call__(self, request: Request, error: Exception) -> Response:
        ours = _as_ours(request, error)
        headers = dict(getattr(error, "headers", None) or {})
        if ours.status == 503:
            headers["retry-after"] = "1"
        if self._front.draining or isinstance(ours, TooLargeError):
            headers["connection"] = "close"  # in the second case the rest of the body is not worth reading
        return _json(ours.body(), ours.status, headers)


def _as_ours(request: Request, error: Exception) -> GaplessError:
    if isinstance(error, GaplessError):
        return error
    if not isinstance(error, HTTPException):
        return InternalError("the server has met an unexpected error")
    if error.status_code == 405:
        return MethodNotAllowedError(f"{request.method} is not allowed on {request.url.path}")
    return NotFoundError(f"no route {request.url.path}")  # the router raises no other


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


def _json(content: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(orjson.dumps(content), status, headers, "application/json")
