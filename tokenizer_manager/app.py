"""The HTTP application: all routes behind one guard."""

from __future__ import annotations

from collections.abc import Callable

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.routing import Route

from gapless.runtime.core.errors import GaplessError
from gapless.tokenizer_manager import admin, chat_template, generate, groups, info, openapi, probe, tokenize
from gapless.tokenizer_manager.front import Front
from gapless.tokenizer_manager.keys import AdminOnly, Guard, Keys
from gapless.tokenizer_manager.openai import routes as openai
from gapless.tokenizer_manager.responses import ErrorResponses
from gapless.tokenizer_manager.routes import RouteSpec

_GROUPS: tuple[Callable[[Front], list[RouteSpec]], ...] = (
    generate.routes,
    admin.routes,
    info.routes,
    probe.routes,
    tokenize.routes,
    chat_template.routes,
    groups.routes,
    openai.routes,
)


def all_routes(front: Front) -> list[RouteSpec]:
    """The route table. Of two routes for a path the first counts."""
    table = [spec for group in _GROUPS for spec in group(front)]
    table += openapi.routes(table)
    return table


def create_app(front: Front) -> Starlette:
    """The application over `front`; it holds no state of its own."""
    keys, errors = Keys(front.config), ErrorResponses(front)
    app = Starlette(
        routes=[_route(spec, keys) for spec in all_routes(front)],
        middleware=[Middleware(Guard, keys=keys, errors=errors)],
        exception_handlers=dict.fromkeys((GaplessError, HTTPException, Exception), errors),
    )
    app.router.redirect_slashes = False
    return app


def _route(spec: RouteSpec, keys: Keys) -> Route:
    route = Route(spec.path, spec.endpoint, methods=list(spec.methods))
    if spec.admin:
        route.app = AdminOnly(route.app, keys)
    return route
