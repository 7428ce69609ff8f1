"""POST /apply_chat_template: the prompt that the model's chat template makes of messages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from gapless.runtime.core.errors import RequestError
from gapless.tokenizer_manager.fields import parse_body, read_body
from gapless.tokenizer_manager.front import Front
from gapless.tokenizer_manager.openai.api import Message
from gapless.tokenizer_manager.openai.messages import for_template
from gapless.tokenizer_manager.responses import json_response
from gapless.tokenizer_manager.routes import RouteSpec


class ApplyChatTemplateBody(msgspec.Struct, kw_only=True):
    """A conversation, as /v1/chat/completions takes it, and whether the prompt ends with the assistant's turn begun."""

    messages: Annotated[list[Message], Meta(min_length=1)]
    add_generation_prompt: bool = True


class ApplyChatTemplateAnswer(msgspec.Struct):
    """The prompt. It has all its special tokens: nothing is to be added to it."""

    text: str


def routes(front: Front) -> list[RouteSpec]:
    async def endpoint(request: Request) -> Response:
        front.check_open()
        strict = front.config.strict_fields
        body = await read_body(request, front.body_room, ApplyChatTemplateBody, strict=strict)
        return json_response({"text": await _render(front, body)})

    return [
        RouteSpec(
            "/apply_chat_template",
            endpoint,
            ("POST",),
            summary="The prompt that the model's chat template makes of messages",
            body=ApplyChatTemplateBody,
            answer=ApplyChatTemplateAnswer,
        )
    ]


async def apply_chat_template(
    front: Front, messages: Sequence[dict[str, Any]], add_generation_prompt: bool
) -> str:
    """The prompt; raises RequestError naming the message at fault, or with what the template says."""
    fields = {"messages": messages, "add_generation_prompt": add_generation_prompt}
    try:
        body = msgspec.json.encode(fields)
    except (TypeError, ValueError, RecursionError) as error:  # of a caller in Python
        raise RequestError(f"messages must be JSON's values: {error}", param="messages") from error
    return await _render(front, parse_body(body, ApplyChatTemplateBody, strict=False))


async def _render(front: Front, body: ApplyChatTemplateBody) -> str:
    # What a chat without tools is rendered with: templates ask for both names.
    variables = {
        "messages": for_template(body.messages),
        "tools": None,
        "add_generation_prompt": body.add_generation_prompt,
    }
    return await front.templates.render(variables)
