"""What readers make of streams as servers send them, the odd and the broken ones, too."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from gapless.bench.serve.dialects import NativeReader, OpenAIReader, Reader, StreamError
from gapless.bench.serve.record import Record


def read(reader: type[OpenAIReader] | type[NativeReader], *events: Any, done: bool = True) -> Record:
    """The record of a stream; event i comes at second i, and a client's token is a character."""
    record = Record(0, prompt_len=1, output_len=9, due=0.0, sent=0.0)
    one: Reader = OpenAIReader(record) if reader is OpenAIReader else NativeReader(record, incremental=False)
    for at, event in enumerate(events):
        one.event(event if isinstance(event, bytes) else orjson.dumps(event), float(at))
    if done:
        one.event(b"[DONE]", float(len(events)))
    one.end()
    one.settle(lambda texts: [len(text) for text in texts])
    return record


def tokens_at(record: Record) -> list[tuple[float, int]]:
    return [(chunk.at, chunk.tokens) for chunk in record.chunks]


def completion(text: str, finish: str | None = None, **fields: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "text": text, "finish_reason": finish}], **fields}


def native(text: str, count: Any, finish: Any = None) -> dict[str, Any]:
    return {"text": text, "meta_info": {"completion_tokens": count, "finish_reason": finish}}


def test_usage_in_the_last_chunk_alone_is_no_chunk_of_all_tokens() -> None:
    """As Mistral and DeepSeek send it: beside a choice without text, instead of in an event of its own."""
    usage = {"prompt_tokens": 3, "completion_tokens": 4}
    record = read(OpenAIReader, completion("a"), completion("bcd"), completion("", "stop", usage=usage))
    assert tokens_at(record) == [(0, 1), (1, 3)]
    assert (record.completion_tokens, record.prompt_tokens) == (4, 3)
    record = read(OpenAIReader, completion("a"), completion("bcd", "stop", usage=usage))
    assert tokens_at(record) == [(0, 1), (1, 3)]


def test_usage_with_each_chunk_counts_it() -> None:
    counts = [{"prompt_tokens": 3, "completion_tokens": total} for total in (0, 2, 3)]
    events = [completion(text, usage=usage) for text, usage in zip(("", "ab", "c"), counts, strict=True)]
    record = read(OpenAIReader, *events, {"choices": [], "usage": counts[-1]})
    assert tokens_at(record) == [(1, 2), (2, 1)]


def test_usage_that_counts_no_completion_tokens_says_nothing_of_them() -> None:
    record = read(OpenAIReader, completion("ab"), {"choices": [], "usage": {"prompt_tokens": 3}})
    assert (record.prompt_tokens, record.completion_tokens, tokens_at(record)) == (3, None, [(0, 2)])


@pytest.mark.parametrize("key", ["content", "reasoning_content", "reasoning"])
def test_reasoning_is_output(key: str) -> None:
    record = read(OpenAIReader, {"choices": [{"delta": {key: "ab"}}]}, {"choices": None, "usage": None})
    assert (record.text, tokens_at(record)) == ("ab", [(0, 2)])


@pytest.mark.parametrize("reader", [OpenAIReader, NativeReader])
def test_a_count_that_goes_back_counts_no_token_twice(reader: Any) -> None:
    def event(count: int) -> dict[str, Any]:
        if reader is NativeReader:
            return native("a" * count, count)
        return completion("a", usage={"prompt_tokens": 1, "completion_tokens": count})

    record = read(reader, event(5), event(3), event(6))
    assert tokens_at(record) == [(0, 5), (2, 1)]
    assert record.completion_tokens == 6


def test_a_reason_that_comes_twice_and_a_stream_without_done() -> None:
    record = read(OpenAIReader, completion("a", "stop"), completion("", "stop"), done=False)
    assert (record.finish_reason, tokens_at(record)) == ("stop", [(0, 1)])
    with pytest.raises(StreamError, match="ended before"):
        read(OpenAIReader, completion("a"), done=False)


@pytest.mark.parametrize("reason", ["abort", "error"])
@pytest.mark.parametrize("reader", [OpenAIReader, NativeReader])
def test_what_the_server_gave_up_has_failed(reader: Any, reason: str) -> None:
    event = completion("a", reason) if reader is OpenAIReader else native("a", 1, {"type": reason})
    with pytest.raises(StreamError, match="aborted"):
        read(reader, event)


@pytest.mark.parametrize(
    ("reader", "event"),
    [
        (NativeReader, native("a", "1")),
        (NativeReader, native("a", 1.5)),
        (NativeReader, {"text": ["a", "b"], "meta_info": {"completion_tokens": 2}}),
        (NativeReader, {"text": "a", "meta_info": [1]}),
        (NativeReader, {"text": "a", "output_ids": 5, "meta_info": {"completion_tokens": 1}}),
        (OpenAIReader, {"choices": ["a"]}),
        (OpenAIReader, {"choices": 5}),
        (OpenAIReader, {"choices": [{"delta": "a"}]}),
        (OpenAIReader, {"choices": [{"delta": {"content": ["a"]}}]}),
        (OpenAIReader, completion("a", usage={"completion_tokens": "1"})),
        (OpenAIReader, completion("a", usage=[1])),
        (OpenAIReader, b'"\xff"'),
        (OpenAIReader, b"5"),
    ],
)
def test_an_event_that_is_not_of_its_kind_fails_the_request_alone(reader: Any, event: Any) -> None:
    with pytest.raises(StreamError, match="event"):
        read(reader, event)


def test_a_native_stream_without_a_count_has_a_token_an_event() -> None:
    record = read(NativeReader, native("a", None), native("ab", None))
    assert (tokens_at(record), record.completion_tokens) == ([(0, 1), (1, 1)], None)
