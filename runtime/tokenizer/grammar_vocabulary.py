"""A vocabulary as llguidance takes it: a trie of the ids' bytes.

Its end token is one of our own after the last id, so that a mask says apart from all real ids whether the output may
end: which ids end a request is the request's own affair.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from llguidance import LLTokenizer
from llguidance import TokenizerWrapper as LLTokenizerSource

from gapless.runtime.tokenizer.pieces import TokenPieces

# Pieces that match one of these are looked at together: where a JSON string goes on, nearly all of them may come.
# Each costs time when the trie is made; llguidance's own four save little more than these two.
_SLICES = [r'[^"\\\x00-\x1F\x7F]{1,10}', r'[^"\\\x00-\x1F\x7F]+']


class _Source:
    """What LLTokenizer reads. `__call__` tokenizes bytes, for grammars that ask for forced tokens."""

    is_tokenizer_wrapper = True
    bos_token_id: int | None = None

    def __init__(self, pieces: TokenPieces) -> None:
        self.eos_token_id = len(pieces)
        # Special ids stand for no text, so none of their bytes ever match.
        self.special_token_ids = [*pieces.special.nonzero()[0].tolist(), self.eos_token_id]
        self.tokens: Sequence[bytes] = [*(pieces.piece(i) for i in range(len(pieces))), b"<end>"]
        self.tokenizer: LLTokenizer | None = None

    def __call__(self, text: str | bytes) -> list[int]:
        assert self.tokenizer is not None
        return self.tokenizer.greedy_tokenize(text.decode() if isinstance(text, bytes) else text)


def grammar_tokenizer(pieces: TokenPieces) -> LLTokenizer:
    """The trie of `pieces`, whose end token is `len(pieces)`.

    Holds the GIL for about a second where there are 262,144 of them, so make it before anything must run on time.
    """
    source = _Source(pieces)
    tokenizer = LLTokenizer(cast(LLTokenizerSource, source), slices=_SLICES)
    source.tokenizer = tokenizer
    source.tokens = ()
    return tokenizer
