"""POST /release_group: the end of a group of requests, such as those of one program."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from gapless.tokenizer_manager.api import ReleaseGroupAnswer, ReleaseGroupBody
from gapless.tokenizer_manager.fields import read_body
from gapless.tokenizer_manager.front import Front
from gapless.tokenizer_manager.responses import json_response
from gapless.tokenizer_manager.routes import RouteSpec


def routes(front: Front) -> list[RouteSpec]:
    async def release(request: Request) -> Response:
        strict = front.config.strict_fields
        body = await read_body(request, front.body_room, ReleaseGroupBody, strict=strict)
        front.release_group(body.group_id)
        return json_response({"success": True})

    return [
        RouteSpec(
            "/release_group",
            release,
            ("POST",),
            summary="Let go of the prefixes that requests with this group_id hold in the cache",
            body=ReleaseGroupBody,
            answer=ReleaseGroupAnswer,
        )
    ]
