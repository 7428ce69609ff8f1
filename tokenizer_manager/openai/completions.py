"""POST /v1/completions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gapless.runtime.core.errors import GaplessError, RequestError
from gapless.tokenizer_manager.answer import next_chunk, whole_answer
from gapless.tokenizer_manager.front import Front
from gapless.tokenizer_manager.openai.api import CompletionAnswer, CompletionBody
from gapless.tokenizer_manager.openai.body import native_fields, read
from gapless.tokenizer_manager.openai.envelope import Envelope, finish_reason, matched_stop
from gapless.tokenizer_manager.openai.errors import renamed
from gapless.tokenizer_manager.routes import RouteSpec
from gapless.tokenizer_manager.schema import GenerateRequest, parse_fields
from gapless.tokenizer_manager.serving import Generating
from gapless.tokenizer_manager.states import RequestState

_DEFAULT_MAX_TOKENS = 16  # OpenAI's
_NOT_SERVED = {"suffix": ("",), "echo": (False,)}
_NAMES = {
    "text": "prompt",
    "input_ids": "prompt",
    "json_schema": "response_format",
}


def routes(front: Front) -> list[RouteSpec]:
    async def parse(data: bytearray) -> CompletionForm:
        body = read(data, CompletionBody, front.config, _NOT_SERVED)
        max_tokens = _DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
        fields = native_fields(body, "cmpl", max_tokens) | _prompt(body.prompt)
        request = parse_fields(fields, front.config)
        kind = "text_completion"
        return CompletionForm(request, Envelope.of(body, fields["rid"], front.config.model_name, kind, kind))

    return [
        RouteSpec(
            "/v1/completions",
            Generating(front, parse, lambda error: renamed(error, _NAMES)),
            ("POST",),
            summary="Continue prompts; with stream, server-sent events of new text, then [DONE]",
            body=CompletionBody,
            answer=CompletionAnswer,
            streams=True,
        )
    ]


def _prompt(prompt: Any) -> dict[str, Any]:
    """As /generate's field: text where it is a string or a list of them, else ids."""
    items = prompt if isinstance(prompt, list) else [prompt]
    if len(kinds := set(map(type, items))) > 1:
        raise RequestError("prompt must not mix strings, ids and lists of ids", param="prompt")
    return {"text" if kinds == {str} else "input_ids": prompt}


@dataclass(frozen=True, slots=True)
class CompletionForm:
    """Satisfies `serving.Form`."""

    request: GenerateRequest
    envelope: Envelope

    def answer(self, states: Sequence[RequestState]) -> Any:
        return self.envelope.answer([_choice(s, whole_answer(s)["text"]) for s in states], states)

    def events(self, state: RequestState) -> list[Any]:
        return [self.envelope.chunk(_choice(state, next_chunk(state, incremental=True)["text"]), state)]

    def failed(self, state: RequestState, error: GaplessError) -> Any:
        return self.envelope.failed(state, error)

    def last_events(self, states: Sequence[RequestState]) -> list[Any]:
        return self.envelope.last_chunks(states)


def _choice(state: RequestState, text: str) -> dict[str, Any]:
    return {
        "index": state.index,
        "text": text,
        "logprobs": None,
        "finish_reason": finish_reason(state),
        "matched_stop": matched_stop(state),
    }
