"""What a route is: each group of them makes a list of `RouteSpec`, and `app` joins the lists.

Every route goes through the one guard that checks keys, stands in /openapi.json, and is visited by the tests that
walk the table.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec


@dataclass(frozen=True, slots=True)
class RouteSpec:
    """`endpoint` is Starlette's: an async function of a Request, or an ASGI application.

    `body` and `answer` are the structs of a JSON request and of its 200 response, for /openapi.json alone: endpoints
    check what they read themselves. Routes need the API key where there is one, `admin` ones the admin key.
    """

    path: str
    endpoint: Any
    methods: tuple[str, ...] = ("GET",)
    admin: bool = False
    summary: str = ""
    body: type[msgspec.Struct] | None = None
    answer: Any = None  # a type
    query: tuple[str, ...] = ()  # names of optional numbers
    media: str = "application/json"  # of the 200 response
    streams: bool = False  # may answer by server-sent events instead
