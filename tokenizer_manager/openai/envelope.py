"""What every answer and chunk of OpenAI's routes carries: identity, usage and the reason of its end."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from gapless.runtime.core.errors import GaplessError
from gapless.runtime.core.messages import Finish
from gapless.tokenizer_manager.openai.api import CommonBody, StreamOptions
from gapless.tokenizer_manager.states import RequestState

_FINISH_REASONS = {Finish.LENGTH: "length", Finish.ABORT: "abort"}


@dataclass(frozen=True, slots=True)
class Envelope:
    """`samples` is how many choices a prompt has; they share its tokens."""

    id: str
    model: str
    kind: str  # of an answer: "chat.completion"
    chunk_kind: str
    samples: int
    include_usage: bool
    continuous_usage: bool
    created: int = field(default_factory=lambda: int(time.time()))

    @classmethod
    def of(cls, body: CommonBody, rid: str, model: str, kind: str, chunk_kind: str) -> Envelope:
        options = body.stream_options or StreamOptions()
        include = bool(options.include_usage)
        return cls(
            rid,
            model,
            kind,
            chunk_kind,
            body.n or 1,
            include,
            include and bool(options.continuous_usage_stats),
        )

    def answer(self, choices: Sequence[dict[str, Any]], states: Sequence[RequestState]) -> dict[str, Any]:
        return self._head(self.kind) | {"choices": choices, "usage": self._usage(states)}

    def chunk(self, choice: dict[str, Any], state: RequestState) -> dict[str, Any]:
        """With include_usage each chunk has the field, which is null until the last one unless asked for."""
        chunk = self._head(self.chunk_kind) | {"choices": [choice]}
        if self.include_usage:
            chunk["usage"] = (
                usage(state.prompt_tokens, len(state.ids), state.cached_tokens)
                if (self.continuous_usage)
                else None
            )
        return chunk

    def last_chunks(self, states: Sequence[RequestState]) -> list[Any]:
        if not self.include_usage:
            return []
        return [self._head(self.chunk_kind) | {"choices": [], "usage": self._usage(states)}]

    def failed(self, state: RequestState, error: GaplessError) -> dict[str, Any]:
        return error.body() | {"index": state.index}

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def _usage(self, states: Sequence[RequestState]) -> dict[str, Any]:
        firsts = states[:: self.samples]
        return usage(
            sum(state.prompt_tokens for state in firsts),
            sum(len(state.ids) for state in states),
            sum(state.cached_tokens for state in firsts),
        )


def usage(prompt: int, completion: int, cached: int) -> dict[str, Any]:
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def finish_reason(state: RequestState) -> str | None:
    """None while the request goes on."""
    finished = state.finished
    return None if finished is None else _FINISH_REASONS.get(Finish(finished.finish), "stop")


def matched_stop(state: RequestState) -> int | str | None:
    """The stop id or string that ended it."""
    return None if state.finished is None else state.finished.matched
