"""JSON responses, and one shape for every error."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from gapless.runtime.core.errors import (
    AuthenticationError,
    GaplessError,
    InternalError,
    NotFoundError,
    RequestError,
    TooLargeError,
)
from gapless.tokenizer_manager.front import Front


class MethodNotAllowedError(RequestError):
    status = 405
    code = "method_not_allowed"


def json_response(content: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(orjson.dumps(content), status, headers, "application/json")


class ErrorResponses:
    """Any exception as a response. One that is not ours is a defect, which uvicorn logs."""

    def __init__(self, front: Front) -> None:
        self._front = front

    async def __call__(self, request: Request, error: Exception) -> Response:
        return self.of(_as_ours(request, error), dict(getattr(error, "headers", None) or {}))

    def of(self, error: GaplessError, headers: dict[str, str]) -> Response:
        if error.status == 503:
            headers["retry-after"] = "1"
        if isinstance(error, AuthenticationError):
            headers["www-authenticate"] = "Bearer"
        if self._front.draining or isinstance(error, TooLargeError):
            headers["connection"] = "close"  # in the second case the rest of the body is not worth reading
        return json_response(error.body(), error.status, headers)


def _as_ours(request: Request, error: Exception) -> GaplessError:
    if isinstance(error, GaplessError):
        return error
    if not isinstance(error, HTTPException):
        return InternalError("the server has met an unexpected error")
    if error.status_code == 405:
        return MethodNotAllowedError(f"{request.method} is not allowed on {request.url.path}")
    return NotFoundError(f"no route {request.url.path}")  # the router raises no other
