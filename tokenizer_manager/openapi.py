"""/openapi.json, made from the route table and its structs, and /docs, a page of it that loads nothing."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cached_property
from html import escape
from typing import Any

import msgspec
import orjson
from starlette.requests import Request
from starlette.responses import Response

import gapless
from gapless.tokenizer_manager.api import Error, Info
from gapless.tokenizer_manager.keys import OPEN_PATHS
from gapless.tokenizer_manager.responses import json_response
from gapless.tokenizer_manager.routes import RouteSpec

_PARAMETER = re.compile(r"{(\w+)(?::\w+)?}")
_STYLE = (
    "body{font:16px sans-serif;max-width:60em;margin:2em auto}pre{background:#eee;padding:1em;overflow:auto}"
)
_NO_LOADING = "default-src 'none'; style-src 'unsafe-inline'"


def routes(table: Sequence[RouteSpec]) -> list[RouteSpec]:
    """The routes that describe `table`, which may still grow (they describe themselves, once they are in it)."""
    document = _Document(table)
    return [
        RouteSpec("/openapi.json", document.json, summary="This description, as OpenAPI 3.1", answer=Info),
        RouteSpec("/docs", document.page, summary="This description, as a page", media="text/html"),
    ]


class _Document:
    def __init__(self, table: Sequence[RouteSpec]) -> None:
        self._table = table

    async def json(self, request: Request) -> Response:
        return json_response(self._content)

    async def page(self, request: Request) -> Response:
        headers = {"content-security-policy": _NO_LOADING}
        return Response(_html(self._content), headers=headers, media_type="text/html")

    @cached_property
    def _content(self) -> dict[str, Any]:
        types = [
            Error,
            *(kind for spec in self._table for kind in (spec.body, spec.answer) if kind is not None),
        ]
        schemas, components = msgspec.json.schema_components(
            types, ref_template="#/components/schemas/{name}"
        )
        error, *rest = schemas
        made = iter(rest)
        paths: dict[str, Any] = {}
        for spec in self._table:
            body = None if spec.body is None else next(made)
            answer = None if spec.answer is None else next(made)
            path = paths.setdefault(_PARAMETER.sub(r"{\1}", spec.path), {})
            for method in spec.methods:
                path[method.lower()] = _operation(spec, method, body, answer, error)
        return {
            "openapi": "3.1.0",
            "info": {"title": "Gapless", "version": gapless.__version__},
            "paths": paths,
            "security": [{"key": []}],
            "components": {
                "schemas": components,
                "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
            },
        }


def _operation(spec: RouteSpec, method: str, body: Any, answer: Any, error: Any) -> dict[str, Any]:
    content = {spec.media: {"schema": {"type": "string"} if answer is None else answer}}
    if spec.streams:
        content["text/event-stream"] = {"schema": {"type": "string"}}
    operation: dict[str, Any] = {
        "operationId": f"{method.lower()}{re.sub(r'[^0-9a-zA-Z]+', '_', spec.path).rstrip('_')}",
        "summary": spec.summary + (" (needs the admin key)" if spec.admin else ""),
        "responses": {
            "200": {"description": "done", "content": content},
            "default": {"description": "an error", "content": {"application/json": {"schema": error}}},
        },
    }
    if spec.path in OPEN_PATHS:
        operation["security"] = []
        operation["responses"]["503"] = {"description": "not able to serve", "content": content}
    parameters = [_parameter(name, "path", "string") for name in _PARAMETER.findall(spec.path)]
    parameters += [_parameter(name, "query", "number") for name in spec.query]
    if parameters:
        operation["parameters"] = parameters
    if body is not None:
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": body}}}
    return operation


def _parameter(name: str, place: str, kind: str) -> dict[str, Any]:
    return {"name": name, "in": place, "required": place == "path", "schema": {"type": kind}}


def _html(document: dict[str, Any]) -> str:
    parts = [
        f"<!doctype html><html lang=en><meta charset=utf-8><title>Gapless</title><style>{_STYLE}</style>"
    ]
    parts.append(f"<h1>Gapless {escape(document['info']['version'])}</h1>")
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            parts.append(f"<h2>{method.upper()} {escape(path)}</h2><p>{escape(operation['summary'])}.</p>")
            if "requestBody" in operation:
                parts.append(
                    _details("body", operation["requestBody"]["content"]["application/json"]["schema"])
                )
            parts.append(_details("answer", operation["responses"]["200"]["content"]))
    parts.append("<h1>Schemas</h1>")
    for name, schema in document["components"]["schemas"].items():
        parts.append(f'<h2 id="{escape(name)}">{escape(name)}</h2>{_details("fields", schema)}')
    return "\n".join(parts)


def _details(title: str, schema: Any) -> str:
    text = escape(orjson.dumps(schema, option=orjson.OPT_INDENT_2).decode())
    return f"<details><summary>{title}</summary><pre>{text}</pre></details>"
