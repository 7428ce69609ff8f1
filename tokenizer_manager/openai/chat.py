"""POST /v1/chat/completions."""

from __future__ import annotations

import dataclasses
from typing import Any

from gapless.runtime.core.errors import RequestError
from gapless.tokenizer_manager.front import Front
from gapless.tokenizer_manager.openai.api import ChatAnswer, ChatBody
from gapless.tokenizer_manager.openai.body import native_fields, read
from gapless.tokenizer_manager.openai.chat_form import ChatForm
from gapless.tokenizer_manager.openai.envelope import Envelope
from gapless.tokenizer_manager.openai.errors import renamed
from gapless.tokenizer_manager.openai.messages import for_template
from gapless.tokenizer_manager.openai.tools import ToolUse, tool_use
from gapless.tokenizer_manager.routes import RouteSpec
from gapless.tokenizer_manager.schema import GenerateRequest, parse_fields
from gapless.tokenizer_manager.serving import Generating

_AS_LONG_AS_FITS = 2**31 - 1
_NOT_SERVED: dict[str, tuple[Any, ...]] = {
    "functions": (),
    "function_call": ("none",),
    "modalities": (["text"],),
    "audio": (),
    "web_search_options": (),
    "chat_template": (),  # a template is code: it comes with the server
    "continue_final_message": (False,),
    "documents": (),
}
_ORIGIN, _TOOLS_ORIGIN = "sampling_params", "tools"  # of the sampling fields, in errors
_NAMES = {
    "text": "messages",
    "json_schema": "response_format",
    f"{_TOOLS_ORIGIN}.json_schema": "tools",
}


def routes(front: Front) -> list[RouteSpec]:
    chat = _Chat(front)
    return [
        RouteSpec(
            "/v1/chat/completions",
            Generating(front, chat.parse, lambda error: renamed(error, _NAMES)),
            ("POST",),
            summary="Answer a conversation; with stream, server-sent events of new text, then [DONE]",
            body=ChatBody,
            answer=ChatAnswer,
            streams=True,
        )
    ]


class _Chat:
    def __init__(self, front: Front) -> None:
        self._front, self._config = front, front.config

    async def parse(self, data: bytearray) -> ChatForm:
        body = read(data, ChatBody, self._config, _NOT_SERVED)
        messages = for_template(body.messages)
        use = tool_use(body, self._front.templates.tool_format()) if body.tools or body.tool_choice else None
        variables = {
            **(body.chat_template_kwargs or {}),
            "messages": messages,
            "tools": use.tools if use else None,
            "add_generation_prompt": True,
        }
        if body.reasoning_effort is not None:
            variables["reasoning_effort"] = body.reasoning_effort
        request = self._request(body, await self._front.templates.render(variables), use)
        envelope = Envelope.of(
            body, request.prompts[0].rid, self._config.model_name, "chat.completion", "chat.completion.chunk"
        )
        tokenizer = self._front.tokenizer
        pieces = tokenizer.pieces if tokenizer is not None and body.logprobs else None
        return ChatForm(request, envelope, use.parser if use else None, pieces, not body.no_stop_trim)

    def _request(self, body: ChatBody, text: str, use: ToolUse | None) -> GenerateRequest:
        limits = (body.max_completion_tokens, body.max_tokens, _AS_LONG_AS_FITS)
        fields = native_fields(body, "chatcmpl", next(limit for limit in limits if limit is not None))
        if use is not None:
            fields["sampling_params"]["json_schema"] = use.schema
            if use.parser().needs_special_tokens:
                fields["sampling_params"]["skip_special_tokens"] = False
        if body.top_logprobs and not body.logprobs:
            raise RequestError("top_logprobs needs logprobs to be true", param="top_logprobs")
        fields |= {"text": text, "return_logprob": body.logprobs, "top_logprobs_num": body.top_logprobs}
        request = parse_fields(fields, self._config)
        origin = _TOOLS_ORIGIN if use is not None and use.schema else _ORIGIN
        prompts = [
            dataclasses.replace(prompt, add_special_tokens=False, params_field=origin)
            for prompt in request.prompts
        ]
        return dataclasses.replace(request, prompts=prompts)
