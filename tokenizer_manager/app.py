"""The HTTP application: routes, and one shape for every error."""

from __future__ import annotations

from typing import Any

import orjson
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

import gapless
from gapless.runtime.core.errors import (
    GaplessError,
    InternalError,
    NotFoundError,
    RequestError,
    TooLargeError,
)
from gapless.tokenizer_manager.front import Front
from gapless.tokenizer_manager.generate import Generate


class MethodNotAllowedError(RequestError):
    status = 405
    code = "method_not_allowed"


def create_app(front: Front) -> Starlette:
    """The application over `front`; it holds no state of its own."""
    info = _Info(front)
    app = Starlette(
        routes=[
            Route("/generate", Generate(front), methods=["POST"]),
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


def _json(content: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(orjson.dumps(content), status, headers, "application/json")
