"""How each kind of server is asked, and what its streams say.

A dialect makes the body of a request and a reader of the answer's events. A reader puts what it learns into the Record;
a chunk is one that brings tokens. Where a server says how many tokens it has made so far, a chunk's tokens are
counted by that, else they are found at the end from the chunks' texts (`settle`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeGuard

import orjson

from gapless.bench.serve.record import Chunk, Record

Whole = list[int] | str | list[dict[str, Any]]  # ids, a text, or chat messages
TEXTS = ("content", "reasoning_content", "reasoning")  # of a chat's delta
BACKENDS = ("gapless", "sglang", "vllm", "openai", "router")


class StreamError(Exception):
    """The server reported a failure in the stream, or the stream is not what it should be."""


@dataclass(frozen=True, slots=True)
class Asking:
    """What all requests of a run have in common."""

    backend: str
    model: str
    temperature: float = 0.0
    ignore_eos: bool = True
    chat: bool = False  # send prompts as a user's message
    incremental: bool = False  # the server streams what is new instead of all so far
    extra: Mapping[str, Any] = field(default_factory=dict)  # joins each body

    @property
    def native(self) -> bool:
        return self.backend in ("gapless", "sglang", "router")

    def uses_chat(self, prompt: Whole) -> bool:
        return self.chat or is_messages(prompt)

    def path(self, prompt: Whole) -> str:
        if self.uses_chat(prompt):
            return "/v1/chat/completions"
        return "/generate" if self.native else "/v1/completions"

    def body(self, prompt: Whole, output_len: int) -> bytes:
        if self.uses_chat(prompt) or not self.native:
            return orjson.dumps(self._openai(prompt, output_len) | dict(self.extra))
        sampling = {"temperature": self.temperature, "max_new_tokens": output_len}
        sampling["ignore_eos"] = self.ignore_eos
        source = "text" if isinstance(prompt, str) else "input_ids"
        extra = dict(self.extra)
        sampling |= extra.pop("sampling_params", {})
        return orjson.dumps({source: prompt, "sampling_params": sampling, "stream": True} | extra)

    def reader(self, prompt: Whole, record: Record) -> Reader:
        if self.uses_chat(prompt) or not self.native:
            return OpenAIReader(record)
        return NativeReader(record, self.incremental)

    def _openai(self, prompt: Whole, output_len: int) -> dict[str, Any]:
        asked: dict[str, Any] = {
            "model": self.model,
            "temperature": self.temperature,
            "max_tokens": output_len,
        }
        asked["stream"], asked["stream_options"] = True, {"include_usage": True}
        if self.backend != "openai":  # no part of OpenAI's API, which refuses unknown fields
            asked["ignore_eos"] = self.ignore_eos
            asked["stream_options"]["continuous_usage_stats"] = True
        if not self.uses_chat(prompt):
            return asked | {"prompt": prompt}
        messages = prompt if is_messages(prompt) else [{"role": "user", "content": prompt}]
        return asked | {"messages": messages}


class Reader:
    """Of one answer; `event` takes the payload of one server-sent event that arrived at `at`."""

    def __init__(self, record: Record) -> None:
        self._record = record
        self._texts: list[str] = []
        self._counted = 0  # most tokens that the server has counted so far
        self._done = False

    def event(self, payload: bytes, at: float) -> int:
        """Returns how many tokens it brought, by what is known now. Raises StreamError."""
        if payload.strip() == b"[DONE]":
            self._done = True
            return 0
        try:
            value = orjson.loads(payload)
        except orjson.JSONDecodeError as error:
            raise StreamError(f"an event is not JSON: {payload[:80]!r}") from error
        if not isinstance(value, dict):
            raise StreamError(f"an event is not an object: {payload[:80]!r}")
        if (failure := value.get("error")) is not None:
            raise StreamError(
                failure.get("message", str(failure)) if isinstance(failure, dict) else str(failure)
            )
        try:
            return self._take(value, at)
        except (AttributeError, TypeError) as error:
            raise StreamError(f"an event is not of its kind: {payload[:80]!r}") from error

    def end(self) -> None:
        """The connection has brought all; raises StreamError where that is not a whole answer."""
        record = self._record
        if not self._done and not record.finish_reason:
            raise StreamError("the stream ended before the answer did")
        if record.finish_reason in ("abort", "error"):
            raise StreamError("the server aborted the request")
        if not record.chunks and record.output_len:
            raise StreamError("the answer brought no token")
        record.text = "".join(self._texts)

    def settle(self, count: Callable[[Sequence[str]], list[int]]) -> None:
        """After the run: the tokens of chunks that the server did not count. `count` gives those of texts."""

    def _take(self, value: dict[str, Any], at: float) -> int:
        """Raises AttributeError or TypeError for what is not of its kind."""
        raise NotImplementedError

    def _new(self, total: int) -> int:
        """How many tokens came, where the server has counted `total` so far."""
        new = max(total - self._counted, 0)
        self._counted += new
        return new

    def _chunk(self, at: float, tokens: int) -> int:
        self._record.chunks.append(Chunk(at, tokens))
        return tokens


class NativeReader(Reader):
    """SGLang's /generate: each event has the count of tokens so far, and all text so far or what is new."""

    def __init__(self, record: Record, incremental: bool) -> None:
        super().__init__(record)
        self._incremental = incremental
        self._ids: list[int] = []

    def _take(self, value: dict[str, Any], at: float) -> int:
        record, meta = self._record, value.get("meta_info") or {}
        reason = meta.get("finish_reason")
        if reason is not None:
            record.finish_reason = reason.get("type", "") if isinstance(reason, dict) else str(reason)
            record.prompt_tokens = _count(meta.get("prompt_tokens"))
            record.cached_tokens = _count(meta.get("cached_tokens"))
        text, ids = _text(value.get("text")), value.get("output_ids") or []
        if not self._incremental:
            self._texts.clear()
            self._ids.clear()
        self._texts.append(text)
        self._ids.extend(ids)
        total = _count(meta.get("completion_tokens"))
        new = self._new(self._counted + (1 if text else 0) if total is None else total)
        record.completion_tokens = None if total is None else self._counted
        record.output_ids = self._ids or None
        return self._chunk(at, new) if new else 0


class OpenAIReader(Reader):
    """OpenAI's completions and chat. Servers like vLLM send usage with each event, others at the end alone."""

    def __init__(self, record: Record) -> None:
        super().__init__(record)
        self._pieces: list[str] = []  # of each chunk
        self._uncounted = False  # whether a chunk came without usage: what comes later is then of all of them
        self._continuous = False  # whether chunks come with their usage

    def _take(self, value: dict[str, Any], at: float) -> int:
        record, text = self._record, ""
        for choice in value.get("choices") or []:
            delta = choice.get("delta") or {}
            text += _text(choice.get("text")) or next(
                filter(None, (_text(delta.get(key)) for key in TEXTS)), ""
            )
            record.finish_reason = str(choice.get("finish_reason") or record.finish_reason)
        total = self._usage(value.get("usage") or {})
        if total is None or self._uncounted or not value.get("choices"):
            new = 1 if text else 0  # until `settle`
            self._uncounted |= bool(text)
        else:
            self._continuous = True
            new = self._new(total)
        if new or text:  # held back text without a token of its own, or tokens whose text is held back
            self._texts.append(text)
            self._pieces.append(text)
            self._chunk(at, new)
        return new

    def _usage(self, usage: dict[str, Any]) -> int | None:
        """Keeps what it says; returns its count of output tokens."""
        record, details = self._record, usage.get("prompt_tokens_details") or {}
        total = _count(usage.get("completion_tokens"))
        if usage:
            record.prompt_tokens = _count(usage.get("prompt_tokens"))
        if total is not None:
            record.completion_tokens = total
        if (cached := _count(details.get("cached_tokens"))) is not None:
            record.cached_tokens = cached
        return total

    def settle(self, count: Callable[[Sequence[str]], list[int]]) -> None:
        record, chunks = self._record, self._record.chunks
        total = record.completion_tokens
        if self._continuous or not chunks or total == len(chunks):
            record.chunks = [chunk for chunk in chunks if chunk.tokens > 0] or chunks
            return
        weights = count(self._pieces)
        shares = shared_out(sum(weights) if total is None else total, weights)
        record.chunks = [Chunk(chunk.at, share) for chunk, share in zip(chunks, shares, strict=True) if share]


def _count(value: object) -> int | None:
    if value is not None and not isinstance(value, int):
        raise TypeError(f"{value!r} is not a count")
    return value


def _text(value: object) -> str:
    if value is not None and not isinstance(value, str):
        raise TypeError(f"{value!r} is not a text")
    return value or ""


def shared_out(total: int, weights: Sequence[int]) -> list[int]:
    """`total` in whole parts as near to the weights' shares as can be (largest remainders first)."""
    whole = sum(weights)
    if not whole:
        weights, whole = [1] * len(weights), len(weights)
    exact = [total * weight / whole for weight in weights]
    parts = [math.floor(value) for value in exact]
    order = sorted(range(len(parts)), key=lambda index: parts[index] - exact[index])
    for index in order[: total - sum(parts)]:
        parts[index] += 1
    return parts


def is_messages(prompt: Whole) -> TypeGuard[list[dict[str, Any]]]:
    return isinstance(prompt, list) and bool(prompt) and isinstance(prompt[0], dict)


def is_ids(prompt: Whole) -> TypeGuard[list[int]]:
    return isinstance(prompt, list) and not is_messages(prompt)
