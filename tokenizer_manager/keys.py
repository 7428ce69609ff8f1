"""Keys: who may use the server, and who may disturb others."""

from __future__ import annotations

import hmac

from starlette.types import ASGIApp, Receive, Scope, Send

from gapless.runtime.core.config import ServerConfig
from gapless.runtime.core.errors import AuthenticationError, ForbiddenError, GaplessError
from gapless.runtime.core.keys import is_loopback
from gapless.tokenizer_manager.responses import ErrorResponses

OPEN_PATHS = frozenset({"/health"})  # what routers and supervisors ask without a key


class Keys:
    """The two keys, compared in constant time. An empty one is no key."""

    def __init__(self, config: ServerConfig) -> None:
        self._user, self._admin = config.api_key.encode(), config.admin_api_key.encode()
        self._is_local = is_loopback(config.host)

    def check_user(self, scope: Scope) -> None:
        """Raises AuthenticationError unless the request brings one of the keys, where there is an API key."""
        if self._user:
            key = _bearer(scope)
            # Both compares always run: the time tells nothing of which key was nearly right.
            is_user = hmac.compare_digest(key, self._user)
            is_admin = hmac.compare_digest(key, self._admin) if self._admin else False
            if not (is_user or is_admin):
                raise AuthenticationError("a valid key is needed: Authorization: Bearer KEY")

    def check_admin(self, scope: Scope) -> None:
        """For what disturbs others. Raises AuthenticationError or ForbiddenError."""
        if not self._admin:
            if any(name == b"sec-fetch-site" and value != b"none" for name, value in scope["headers"]):
                raise ForbiddenError("a web page may not do this: give the server an --admin-api-key")
            if not self._is_local:
                raise ForbiddenError(
                    "this is off on an address other than loopback unless the server has an --admin-api-key"
                )
        elif not hmac.compare_digest(_bearer(scope), self._admin):
            raise AuthenticationError("the admin key is needed: Authorization: Bearer KEY")


def _bearer(scope: Scope) -> bytes:
    """The key of the request's Authorization header; empty where there is none, or more than one header."""
    values = [value for name, value in scope["headers"] if name == b"authorization"]
    scheme, _, key = values[0].partition(b" ") if len(values) == 1 else (b"", b"", b"")
    return bytes(key.strip()) if scheme.lower() == b"bearer" else b""


class Guard:
    """Checks the API key before anything else looks at the request; every path is closed that is not named open."""

    def __init__(self, app: ASGIApp, keys: Keys, errors: ErrorResponses) -> None:
        self._app, self._keys, self._errors = app, keys, errors

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] not in OPEN_PATHS:
            try:
                self._keys.check_user(scope)
            except GaplessError as error:
                await self._errors.of(error, {})(scope, receive, send)
                return
        await self._app(scope, receive, send)


class AdminOnly:
    """An endpoint behind the admin key: `app` is an ASGI application."""

    def __init__(self, app: ASGIApp, keys: Keys) -> None:
        self._app, self._keys = app, keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._keys.check_admin(scope)
        await self._app(scope, receive, send)
