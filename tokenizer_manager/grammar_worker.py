"""The process that looks at grammars first: `python -m gapless.tokenizer_manager.grammar_worker`.

What a client sends may take minutes or gigabytes to compile, or kill the compiler. Here that kills nothing else: memory
is limited, and whoever asks ends this process when it takes too long. Frames both ways: a length in 4 bytes, then
MessagePack.
"""

from __future__ import annotations

import re
import resource
import signal
import sys
from typing import IO

import msgspec
from llguidance import LLMatcher, LLTokenizer

from gapless.runtime.core.child import set_parent_death_signal
from gapless.runtime.core.grammar_text import to_lark
from gapless.runtime.tokenizer.byte_tokenizer import ByteTokenizer
from gapless.runtime.tokenizer.grammar_vocabulary import grammar_tokenizer
from gapless.tokenizer_manager.grammar_frames import Checked, Grammar, read_frame, write_frame

MAX_MEMORY = 2 << 30  # bytes of address space
_PROBE = 64  # tokens of an output that are tried
_SHOWN = 300  # characters of an error


def check(tokenizer: LLTokenizer, grammar: Grammar) -> Checked:
    """The grammar in Lark, or what is wrong with it: it is compiled, and the start of one output is tried."""
    try:
        lark = to_lark(grammar.kind, grammar.text)
    except ValueError as error:
        return Checked(error=str(error))
    matcher = LLMatcher(tokenizer, lark, log_level=0)
    probe(matcher, tokenizer.eos_token)
    if matcher.is_error():
        return Checked(error=_reason(matcher.get_error(), shows_place=grammar.kind == "ebnf"))
    return Checked(lark=lark)


def probe(matcher: LLMatcher, end: int) -> None:
    """Goes along one output, so that what fails at once, or soon, does so here."""
    for _ in range(_PROBE):
        if matcher.is_error() or matcher.is_stopped():
            return
        try:
            mask = int.from_bytes(matcher.compute_bitmask(), "little") & ~(1 << end)
        except ValueError:  # the matcher keeps the reason
            return
        if not mask:
            return
        matcher.consume_token((mask & -mask).bit_length() - 1)


def _reason(error: str, *, shows_place: bool) -> str:
    """What llguidance says, without its state, and with the place in the Lark text where that is the client's own."""
    reason = re.split(r"\n(?:<state>|<backtrace>)", error, maxsplit=1)[0]
    if not shows_place:
        reason = re.split(r"\n +\d+ \| ", re.sub(r"^at \d+\(\d+\): ", "", reason), maxsplit=1)[0]
    reason = reason.strip()
    if reason == "NoExtensionBias":
        reason = "no output can match it"
    return reason if len(reason) <= _SHOWN else reason[:_SHOWN] + "..."


def serve(requests: IO[bytes], answers: IO[bytes]) -> None:
    """Answers until the other side is gone. The first frame says that the process is ready."""
    tokenizer = grammar_tokenizer(ByteTokenizer().pieces)
    write_frame(answers, msgspec.msgpack.encode(Checked()))
    decoder = msgspec.msgpack.Decoder(Grammar)
    while (frame := read_frame(requests)) is not None:
        write_frame(answers, msgspec.msgpack.encode(check(tokenizer, decoder.decode(frame))))


def main() -> None:
    set_parent_death_signal(signal.SIGKILL)
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY, MAX_MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    serve(sys.stdin.buffer, sys.stdout.buffer)


if __name__ == "__main__":
    main()
