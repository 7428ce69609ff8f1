"""The event stream format, whatever way its bytes are cut."""

import re
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gapless.runtime.core.sse import EventParser


def in_pieces(stream: bytes, cuts: list[int]) -> list[bytes]:
    parser, edges = EventParser(), [0, *sorted(cuts), len(stream)]
    return [e for a, b in pairwise(edges) for e in parser.feed(stream[a:b])]


def stated(stream: bytes) -> list[bytes]:
    """The format as the WHATWG states it, on a whole stream, line by line."""
    *lines, _unfinished = re.split(rb"\r\n|\n|\r", stream.removeprefix(b"\xef\xbb\xbf"))
    payloads, data = [], b""
    for line in lines:
        if line == b"":
            if data:
                payloads.append(data[:-1])
            data = b""
        elif line == b"data" or line.startswith(b"data:"):
            data += line[5:].removeprefix(b" ") + b"\n"
    return payloads


@pytest.mark.parametrize(
    ("stream", "payloads"),
    [
        (b'data: {"a": 1}\n\n', [b'{"a": 1}']),
        (b"data: a\n\ndata: b\n\ndata: [DONE]\n\n", [b"a", b"b", b"[DONE]"]),
        (b"data: a\r\n\r\ndata: b\r\rdata: c\n\n", [b"a", b"b", b"c"]),
        (b"data: a\ndata:b\ndata:  c\n\n", [b"a\nb\n c"]),
        (b"data\n\ndata:\n\ndata\ndata\n\n", [b"", b"", b"\n"]),
        (b": comment\n\nevent: x\nid: 1\nretry: 5\ndatabase: no\ndata: a\n\n", [b"a"]),
        (b"event: nothing\n\n\n\n", []),
        (b"\xef\xbb\xbfdata: a\n\n\xef\xbb\xbfdata: b\n\n", [b"a"]),
        (b"data: a\n\ndata: unfinished\n", [b"a"]),
        (b"data: a: b\n\n data: c\n\n", [b"a: b"]),
        (b"data: \x00\x0b\x0c\x1c\xc2\x85\xe2\x80\xa8\n\n", [b"\x00\x0b\x0c\x1c\xc2\x85\xe2\x80\xa8"]),
        (b"", []),
    ],
)  # fmt: skip
def test_a_stream_gives_the_same_payloads_whole_and_byte_by_byte(
    stream: bytes, payloads: list[bytes]
) -> None:
    assert in_pieces(stream, []) == payloads
    assert in_pieces(stream, list(range(len(stream)))) == payloads
    assert stated(stream) == payloads


WORDS = st.sampled_from(
    [b"data", b"data: ", b":", b" ", b"\n", b"\n\n", b"\r", b"\r\n", b"x", b"\xef\xbb\xbf"]
)


@given(st.lists(WORDS, max_size=30).map(b"".join), st.data())
def test_any_cut_of_any_stream_gives_what_the_format_says(stream: bytes, data: st.DataObject) -> None:
    cuts = data.draw(st.lists(st.integers(0, len(stream)), max_size=8))
    assert in_pieces(stream, cuts) == stated(stream)


def test_each_payload_comes_with_the_bytes_that_complete_it() -> None:
    parser = EventParser()
    assert parser.feed(b"data: a\n") == []
    assert parser.feed(b"\ndata: b\n\nda") == [b"a", b"b"]
    assert parser.feed(b"ta: c\r") == []
    assert parser.feed(b"\n\r") == [b"c"]
    assert parser.feed(b"\ndata: d\n\n") == [b"d"]


@pytest.mark.parametrize(
    "stream", [b"data: 12345\n\n", b"data:12345\ndata:12345\n", b"12345678901", b": 123456789\n"]
)
@pytest.mark.parametrize("size", [1, 100])
def test_an_event_of_more_than_the_limit_is_an_error(stream: bytes, size: int) -> None:
    parser = EventParser(10)
    with pytest.raises(ValueError, match="longer than 10 bytes"):
        for start in range(0, len(stream), size):
            parser.feed(stream[start : start + size])


def test_only_one_event_counts_for_the_limit() -> None:
    parser = EventParser(10)
    assert parser.feed(b"data: 1234\n\n: comment\n" * 100) == [b"1234"] * 100
