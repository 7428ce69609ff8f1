"""What the HTTP process and its grammar worker say to each other."""

from __future__ import annotations

from typing import IO

import msgspec


class Grammar(msgspec.Struct, array_like=True):
    """`kind` is the field of SamplingParams that `text` came in."""

    kind: str
    text: str


class Checked(msgspec.Struct, array_like=True):
    """The grammar in Lark, or what is wrong with it."""

    lark: str = ""
    error: str = ""


def write_frame(stream: IO[bytes], content: bytes) -> None:
    stream.write(len(content).to_bytes(4, "little") + content)
    stream.flush()


def read_frame(stream: IO[bytes]) -> bytes | None:
    """None at the end of the stream."""
    head = stream.read(4)
    if len(head) < 4:
        return None
    length = int.from_bytes(head, "little")
    content = stream.read(length)
    return content if len(content) == length else None
