"""A tokenizer run by the tokenizers library."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import tokenizers

from gapless.runtime.tokenizer.base import scalar_text
from gapless.runtime.tokenizer.definition import Facts
from gapless.runtime.tokenizer.pieces import TokenPieces


class FastTokenizer:
    """Satisfies `Tokenizer`. `json_path` is a tokenizer.json; raises whatever the library finds wrong with it."""

    def __init__(self, json_path: Path, facts: Facts, pieces: TokenPieces) -> None:
        self._library = tokenizers.Tokenizer.from_file(str(json_path))
        self.pieces = pieces
        self.vocab_size = len(pieces)
        self.bos_token_id = facts.bos_token_id
        self.eos_token_ids = frozenset(facts.eos_token_ids)
        self.special_ids = frozenset(pieces.special.nonzero()[0].tolist())
        self.chat_template = facts.chat_template
        self.special_tokens: Mapping[str, str] = facts.special_tokens

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return self.encode_batch([text], add_special_tokens)[0]

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]:
        # Of the library's calls only the batch ones release the GIL, and the fast one skips character offsets.
        inputs = [scalar_text(text) for text in texts]
        found = self._library.encode_batch_fast(inputs, add_special_tokens=add_special_tokens)
        return [encoding.ids for encoding in found]

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        return self.pieces.decode(ids, skip_special_tokens)
