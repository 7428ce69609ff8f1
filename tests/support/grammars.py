"""What a grammar accepts, asked of llguidance byte by byte."""

from __future__ import annotations

import functools

import numpy as np
from llguidance import LLMatcher, LLTokenizer

from gapless.runtime.tokenizer.byte_tokenizer import ByteTokenizer
from gapless.runtime.tokenizer.grammar_vocabulary import grammar_tokenizer


@functools.cache
def byte_vocabulary() -> LLTokenizer:
    return grammar_tokenizer(ByteTokenizer().pieces)


def allowed(matcher: LLMatcher) -> set[int]:
    """The ids that may come next, the end among them; none where the matcher has failed."""
    if matcher.is_error():
        return set()
    try:
        mask = np.frombuffer(matcher.compute_bitmask(), np.uint8)
    except ValueError:
        return set()
    return set(np.unpackbits(mask, bitorder="little").nonzero()[0].tolist())


def matches(lark: str, text: str) -> bool:
    """Whether the masks let each byte of `text` pass, and then its end. The grammar itself must be right."""
    vocabulary = byte_vocabulary()
    matcher = LLMatcher(vocabulary, lark, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    for byte in text.encode():
        if byte not in allowed(matcher) or not matcher.consume_token(byte):
            return False
    return vocabulary.eos_token in allowed(matcher)
