"""POST /v1/completions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from gapless.runtime.core.errors import GaplessError, RequestError
from gapless.runtime.tokenizer.base import Tokenizer
from gapless.runtime.tokenizer.pieces import TokenPieces
from gapless.tokenizer_manager.answer import next_chunk, whole_answer
from gapless.tokenizer_manager.front import Front
from gapless.tokenizer_manager.openai.api import CompletionAnswer, CompletionBody
from gapless.tokenizer_manager.openai.body import native_fields, read
from gapless.tokenizer_manager.openai.envelope import Envelope, finish_reason, matched_stop
from gapless.tokenizer_manager.openai.errors import renamed
from gapless.tokenizer_manager.openai.logprobs import CompletionLogprobs, output_rows, prompt_rows
from gapless.tokenizer_manager.routes import RouteSpec
from gapless.tokenizer_manager.schema import GenerateRequest, parse_fields
from gapless.tokenizer_manager.serving import Generating
from gapless.tokenizer_manager.states import RequestState

_DEFAULT_MAX_TOKENS = 16  # OpenAI's
_NOT_SERVED = {"suffix": ("",)}
_NAMES = {
    "text": "prompt",
    "input_ids": "prompt",
    "json_schema": "response_format",
}


def routes(front: Front) -> list[RouteSpec]:
    async def parse(data: bytearray) -> CompletionForm:
        body = read(data, CompletionBody, front.config, _NOT_SERVED)
        max_tokens = _DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
        fields = native_fields(body, "cmpl", max_tokens) | _prompt(body.prompt) | _logprobs(body)
        request = parse_fields(fields, front.config)
        kind = "text_completion"
        envelope = Envelope.of(body, fields["rid"], front.config.model_name, kind, kind)
        tokenizer = front.tokenizer
        assert tokenizer is not None
        return CompletionForm(
            request,
            envelope,
            echoes=_echoes(request, tokenizer) if body.echo else [],
            pieces=None if body.logprobs is None else tokenizer.pieces,
            hides_special=body.skip_special_tokens is not False,
            trimmed=not body.no_stop_trim,
        )

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


def _logprobs(body: CompletionBody) -> dict[str, Any]:
    """As /generate's fields."""
    if body.logprobs is None:
        return {}
    start = 0 if body.echo else -1
    return {"return_logprob": True, "top_logprobs_num": body.logprobs, "logprob_start_len": start}


def _echoes(request: GenerateRequest, tokenizer: Tokenizer) -> list[str]:
    """What comes before the text of each choice."""
    for i, prompt in enumerate(request.prompts):
        for token_id in prompt.input_ids or ():
            if not 0 <= token_id < tokenizer.vocab_size:
                raise RequestError(f"prompt[{i}] has the id {token_id}, which has no text", param="echo")
    return [
        tokenizer.decode(prompt.input_ids or ()) if prompt.text is None else prompt.text
        for prompt in request.prompts
        for _ in prompt.rids
    ]


@dataclass(slots=True)
class CompletionForm:
    """Satisfies `serving.Form`. `echoes` has a text for each choice, or nothing.

    `pieces` are given where log probabilities are asked for; `hides_special` tokens have no text, and where the text
    is `trimmed` a stop token at its end has none.
    """

    request: GenerateRequest
    envelope: Envelope
    echoes: list[str]
    pieces: TokenPieces | None
    hides_special: bool
    trimmed: bool
    _logprobs: dict[int, CompletionLogprobs] = field(default_factory=dict)
    _begun: set[int] = field(default_factory=set)

    def answer(self, states: Sequence[RequestState]) -> Any:
        return self.envelope.answer([self._choice(state, whole_answer(state)) for state in states], states)

    def events(self, state: RequestState) -> list[Any]:
        return [self.envelope.chunk(self._choice(state, next_chunk(state, incremental=True)), state)]

    def failed(self, state: RequestState, error: GaplessError) -> Any:
        return self.envelope.failed(state, error)

    def last_events(self, states: Sequence[RequestState]) -> list[Any]:
        return self.envelope.last_chunks(states)

    def _choice(self, state: RequestState, gained: dict[str, Any]) -> dict[str, Any]:
        """What /generate would say of a choice, or of what it has gained, in OpenAI's words."""
        text = gained["text"]
        if self.echoes and state.index not in self._begun:
            self._begun.add(state.index)
            text = self.echoes[state.index] + text
        return {
            "index": state.index,
            "text": text,
            "logprobs": self._scores(state, gained["meta_info"]),
            "finish_reason": finish_reason(state),
            "matched_stop": matched_stop(state),
        }

    def _scores(self, state: RequestState, meta: dict[str, Any]) -> dict[str, Any] | None:
        if self.pieces is None:
            return None
        if state.index not in self._logprobs:
            self._logprobs[state.index] = CompletionLogprobs(self.pieces, hides_special=self.hides_special)
        rows = output_rows(meta, state, trimmed=self.trimmed)
        return self._logprobs[state.index].next(prompt_rows(meta) + rows)
