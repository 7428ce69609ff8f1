"""Random outputs of a tokenizer with all that the detokenizer must know of them, and what a client may see of each.

The reference looks at all bytes of an output after each token, with no state in between.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from gapless.runtime.core.messages import Finish
from gapless.runtime.tokenizer.pieces import TokenPieces

WORDS = (
    "a",
    " the",
    "END",
    "ENEND",
    "##",
    "語",
    "é",
    "👩‍👩‍👧",
    "🏳️‍🌈",
    "\ufffd",
    "\r\n",
    "    ",
    "中文",
    "“x”",
    "\x00",
)
NOT_UTF8 = (
    b"\xff",
    b"\xc0\x80",
    b"\xe0\x80",
    b"\xed\xa0\x80",
    b"\xf0\x80\x80\x80",
    b"\xf4\x90\x80\x80",
    b"\xef\xbf",
)
PLANES = ((0x20, 0x7F), (0x80, 0x800), (0x800, 0xD800), (0xE000, 0x10000), (0x10000, 0x110000))
# Every beginning of a character that is not all of it, for one of 64 characters that differ in the last byte.
# Surrogates are none, but Python's incremental decoder says so at their third byte.
UNFINISHED = {
    whole[:size]
    for code in range(0x80, 0x110000, 64)
    for whole in (chr(code).encode(errors="surrogatepass"),)
    for size in range(1, len(whole))
}


@dataclass
class Family:
    """A tokenizer: its pieces, the id of each run of bytes that is one, and how all of an output is decoded at once."""

    pieces: TokenPieces
    decode: Callable[[list[int], bool], str]
    bytes_of: list[bytes] = field(init=False)
    id_of: dict[bytes, int] = field(init=False)
    special: list[int] = field(init=False)
    hidden: frozenset[int] = field(init=False)  # the same

    def __post_init__(self) -> None:
        self.special = self.pieces.special.nonzero()[0].tolist()
        self.hidden = frozenset(self.special)
        self.bytes_of = [self.pieces.piece(i) for i in range(len(self.pieces))]
        plain = set(range(len(self.pieces))).difference(self.hidden)
        self.id_of = {self.bytes_of[i]: i for i in plain}
        assert all(bytes([value]) in self.id_of for value in range(256))


# ---------------------------------------------------------------- what is asked for


@dataclass
class Case:
    """A request, the ids that its model gives, and how it ends if no stop string does it."""

    ids: list[int]
    stops: tuple[str, ...]
    skip_special: bool
    no_stop_trim: bool
    least: int  # min_new_tokens
    end: Finish  # STOP_TOKEN and LENGTH come with the last id, ABORT after it

    def data(self, family: Family, count: int) -> bytes:
        """The bytes of the first `count` ids, but of those that are not shown."""
        trimmed = count == len(self.ids) and self.end == Finish.STOP_TOKEN and not self.no_stop_trim
        shown = self.ids[: count - trimmed]
        if self.skip_special:
            shown = [token for token in shown if token not in family.hidden]
        return b"".join([family.bytes_of[token] for token in shown if token < len(family.bytes_of)])


def draw(rng: random.Random, family: Family) -> Case:
    ids = list(cut(rng, b"".join(part(rng) for _ in range(rng.randrange(9))), family))
    for _ in range(rng.choice((0, 0, 1, 5))):
        odd = rng.choice((rng.choice(family.special), rng.randrange(len(family.bytes_of)), 10**6))
        ids.insert(rng.randint(0, len(ids)), odd)
    skip_special = rng.random() < 0.7
    text = family.decode(ids, skip_special)
    stops = tuple(stop_string(rng, text) for _ in range(rng.choice((0, 1, 1, 2, 4))))
    least = rng.choice((0, 0, 0, 1, len(ids) // 2, len(ids)))
    end = rng.choice((Finish.STOP_TOKEN, Finish.LENGTH, Finish.ABORT)) if ids else Finish.ABORT
    return Case(ids, stops, skip_special, rng.random() < 0.2, least, end)


def part(rng: random.Random) -> bytes:
    """Some text, bytes that are none, or a character that breaks off."""
    match rng.randrange(6):
        case 0:
            return rng.choice(NOT_UTF8) * rng.choice((1, 1, 3))
        case 1:
            return rng.randbytes(rng.randint(1, 4))
        case 2 | 3:
            text = "".join(chr(rng.randrange(*rng.choice(PLANES))) for _ in range(rng.randint(1, 4)))
            data = text.encode()
            return data[: rng.randint(1, len(data))] if rng.random() < 0.3 else data
        case _:
            return "".join(rng.choices(WORDS, k=rng.randint(1, 3))).encode()


def cut(rng: random.Random, data: bytes, family: Family) -> Iterator[int]:
    """Ids of `data`, of tokens as long as it happens: most ends are inside a character."""
    at = 0
    while at < len(data):
        size = rng.randint(1, 6)
        while data[at : at + size] not in family.id_of:
            size -= 1
        yield family.id_of[data[at : at + size]]
        at += size


def stop_string(rng: random.Random, text: str) -> str:
    """Often part of the text, or part of it and a character that does not follow."""
    begin = rng.randrange(len(text) + 1)
    found = text[begin : begin + rng.choice((1, 2, 3, 5, 9))]
    if not found or rng.random() < 0.4:
        found += rng.choice(WORDS)
    return found


# ---------------------------------------------------------------- what is right


@dataclass
class Right:
    """What a client may have seen after each token, and the end."""

    shown: list[str] = field(default_factory=list)
    text: str = ""
    tokens: int = 0
    finish: Finish = Finish.NONE
    stop: str | None = None


def decided(data: bytes) -> str:
    """The text of `data`, whatever follows it: without the last 1 to 3 bytes where they begin a character."""
    held = max((n for n in range(1, min(len(data), 3) + 1) if data[-n:] in UNFINISHED), default=0)
    return data[: len(data) - held].decode(errors="replace")


def right(case: Case, family: Family) -> Right:
    result, text = Right(), ""
    for count in [*range(1, len(case.ids) + 1), None]:  # None: what comes after the last id
        result.tokens = len(case.ids) if count is None else count
        data, before = case.data(family, result.tokens), len(text)
        last = result.tokens == len(case.ids) and (count is None or case.end != Finish.ABORT)
        text = data.decode(errors="replace") if last else decided(data)
        ends = range(before + 1, len(text) + 1) if result.tokens > case.least else ()
        if end := next((end for end in ends if case.stops and text.endswith(case.stops, 0, end)), None):
            result.stop = max((s for s in case.stops if text.endswith(s, 0, end)), key=len)
            result.text = text[: end - len(result.stop) * (not case.no_stop_trim)]
            result.finish = Finish.STOP_STRING
            return result
        if last:
            break
        held = max((n for s in case.stops for n in range(1, len(s)) if text.endswith(s[:n])), default=0)
        result.shown.append(text[: len(text) - held])
    result.text, result.finish = text, case.end
    return result
