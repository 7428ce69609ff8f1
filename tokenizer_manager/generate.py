"""POST /generate: one JSON answer, or server-sent events, in SGLang's form."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gapless.runtime.core.errors import GaplessError
from gapless.tokenizer_manager.answer import next_chunk, whole_answer
from gapless.tokenizer_manager.api import GenerateAnswer, GenerateBody
from gapless.tokenizer_manager.front import Front
from gapless.tokenizer_manager.routes import RouteSpec
from gapless.tokenizer_manager.schema import GenerateRequest, parse_generate
from gapless.tokenizer_manager.serving import Generating
from gapless.tokenizer_manager.states import RequestState


def routes(front: Front) -> list[RouteSpec]:
    async def parse(body: bytearray) -> GenerateForm:
        config = front.config
        return GenerateForm(parse_generate(body, config), config.incremental_streaming_output)

    return [
        RouteSpec(
            "/generate",
            Generating(front, parse),
            ("POST",),
            summary="Continue prompts; with stream, server-sent events of cumulative answers, then [DONE]",
            body=GenerateBody,
            answer=GenerateAnswer | list[GenerateAnswer],
            streams=True,
        )
    ]


@dataclass(frozen=True, slots=True)
class GenerateForm:
    """Satisfies `serving.Form`."""

    request: GenerateRequest
    incremental: bool  # a stream's events bring what is new, not all that came

    def answer(self, states: Sequence[RequestState]) -> Any:
        answers = [whole_answer(state) for state in states]
        return answers if self.request.is_list else answers[0]

    def events(self, state: RequestState) -> list[Any]:
        return [self._indexed(state, next_chunk(state, self.incremental))]

    def failed(self, state: RequestState, error: GaplessError) -> Any:
        return self._indexed(state, error.body())

    def last_events(self, states: Sequence[RequestState]) -> list[Any]:
        return []

    def _indexed(self, state: RequestState, event: dict[str, Any]) -> dict[str, Any]:
        return event | {"index": state.index} if self.request.is_list else event
