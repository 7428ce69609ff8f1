"""Answers and chunks of a chat, with the tool calls found in the text."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from gapless.runtime.core.errors import GaplessError
from gapless.runtime.tokenizer.pieces import TokenPieces
from gapless.tokenizer_manager.answer import next_chunk, whole_answer
from gapless.tokenizer_manager.openai.envelope import Envelope, finish_reason, matched_stop
from gapless.tokenizer_manager.openai.logprobs import chat_logprobs, output_rows
from gapless.tokenizer_manager.openai.tool_parser import Call, Item, ToolParser
from gapless.tokenizer_manager.schema import GenerateRequest
from gapless.tokenizer_manager.states import RequestState


@dataclass(slots=True)
class ChatForm:
    """Satisfies `serving.Form`. `parser` makes the reader of an output, where there are tools.

    `pieces` are given where log probabilities are asked for; `trimmed`: the text ends before a stop token.
    """

    request: GenerateRequest
    envelope: Envelope
    parser: Callable[[], ToolParser] | None
    pieces: TokenPieces | None
    trimmed: bool
    _readings: dict[int, _Reading] = field(default_factory=dict)

    def answer(self, states: Sequence[RequestState]) -> Any:
        return self.envelope.answer([self._whole(state) for state in states], states)

    def events(self, state: RequestState) -> list[Any]:
        is_new = state.index not in self._readings
        reading = self._reading(state)
        deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}] if is_new else []
        chunk = next_chunk(state, incremental=True)
        new: list[dict[str, Any]] = [
            {"content": part} if isinstance(part, str) else {"tool_calls": [part]}
            for part in reading.read(chunk["text"], last=state.finished is not None)
        ]
        logprobs = self._logprobs(chunk, state)
        if logprobs and logprobs["content"] and not new:
            new = [{"content": ""}]  # of tokens whose text is held back
        events = [_choice(state, "delta", delta, None) for delta in deltas + new]
        if new:
            events[len(deltas)]["logprobs"] = logprobs
        if state.finished is not None:
            events.append(_choice(state, "delta", {}, reading.finish_reason(state)))
        return [self.envelope.chunk(event, state) for event in events]

    def failed(self, state: RequestState, error: GaplessError) -> Any:
        return self.envelope.failed(state, error)

    def last_events(self, states: Sequence[RequestState]) -> list[Any]:
        return self.envelope.last_chunks(states)

    def _whole(self, state: RequestState) -> dict[str, Any]:
        reading = self._reading(state)
        whole = whole_answer(state)
        parts = reading.read(whole["text"], last=True)
        content = "".join(part for part in parts if isinstance(part, str))
        calls = [
            {name: value for name, value in part.items() if name != "index"}
            for part in parts
            if not isinstance(part, str)
        ]
        message: dict[str, Any] = {"role": "assistant", "content": content}
        if calls:
            message |= {"content": content or None, "tool_calls": calls}
        choice = _choice(state, "message", message, reading.finish_reason(state))
        return choice | {"logprobs": self._logprobs(whole, state)}

    def _logprobs(self, answer: dict[str, Any], state: RequestState) -> dict[str, Any] | None:
        if self.pieces is None:
            return None
        return chat_logprobs(output_rows(answer["meta_info"], state, trimmed=self.trimmed), self.pieces)

    def _reading(self, state: RequestState) -> _Reading:
        if state.index not in self._readings:
            self._readings[state.index] = _Reading(self.parser() if self.parser else None)
        return self._readings[state.index]


@dataclass(slots=True)
class _Reading:
    """How far one output has been read."""

    parser: ToolParser | None
    calls: int = 0

    def read(self, text: str, *, last: bool) -> list[str | dict[str, Any]]:
        """The text and the tool calls that `text` completes, the latter as in a chunk."""
        if self.parser is None:
            return [text] if text else []
        items = self.parser.push(text)
        if last:
            items += self.parser.finish()
        return [item if isinstance(item, str) else self._call(item) for item in _joined(items)]

    def finish_reason(self, state: RequestState) -> str | None:
        reason = finish_reason(state)
        return "tool_calls" if reason == "stop" and self.calls else reason

    def _call(self, call: Call) -> dict[str, Any]:
        assert self.parser is not None
        self.calls += 1
        function = {"name": call.name, "arguments": call.arguments}
        index = self.calls - 1
        return {"index": index, "id": self.parser.new_id(), "type": "function", "function": function}


def _joined(items: Iterable[Item]) -> Iterable[Item]:
    """Text that stands together as one item."""
    for is_text, group in itertools.groupby(items, lambda item: isinstance(item, str)):
        if is_text:
            yield "".join(item for item in group if isinstance(item, str))
        else:
            yield from group


def _choice(state: RequestState, name: str, content: dict[str, Any], reason: str | None) -> dict[str, Any]:
    return {
        "index": state.index,
        name: content,
        "logprobs": None,
        "finish_reason": reason,
        "matched_stop": matched_stop(state) if reason else None,
    }
