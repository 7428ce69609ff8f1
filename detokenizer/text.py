"""Token ids to text, one id at a time.

Text is the UTF-8 decoding of the joined pieces, so an incremental decoder over their bytes gives it without ever
looking back: text once shown stays, the cost is linear, and at most the 3 bytes of an unfinished character are held.
"""

from __future__ import annotations

import codecs

from gapless.runtime.tokenizer.pieces import TokenPieces


class Vocabulary:
    """The pieces of a tokenizer with the ids seen so far at hand.

    `whole(id)` is the piece's text where its bytes are characters by themselves, else None: nearly every id of
    a real text needs no decoding twice.
    """

    def __init__(self, pieces: TokenPieces) -> None:
        self._pieces = pieces
        self._whole: dict[int, str | None] = {}

    def piece(self, token_id: int) -> bytes:
        return self._pieces.piece(token_id)

    def is_special(self, token_id: int) -> bool:
        return self._pieces.is_special(token_id)

    def whole(self, token_id: int) -> str | None:
        try:
            return self._whole[token_id]
        except KeyError:
            text = self._whole[token_id] = _strict(self.piece(token_id))
            return text


class IncrementalText:
    """The text of one output. Bytes that are not UTF-8 become U+FFFD as soon as they are known not to be.

    Python's decoder knows it of a surrogate (ED A0..BF 80..BF) at the third byte, though the second would do.
    """

    __slots__ = ("_pending", "_skip_special", "_vocabulary")

    def __init__(self, vocabulary: Vocabulary, skip_special_tokens: bool) -> None:
        self._vocabulary = vocabulary
        self._skip_special = skip_special_tokens
        self._pending = b""  # the start of a character, at most 3 bytes

    def push(self, token_id: int) -> str:
        """The text that `token_id` completes, "" while it ends inside a character."""
        if self._skip_special and self._vocabulary.is_special(token_id):
            return ""
        if not self._pending and (text := self._vocabulary.whole(token_id)) is not None:
            return text
        data = self._pending + self._vocabulary.piece(token_id)
        text, used = codecs.utf_8_decode(data, "replace", False)
        self._pending = data[used:]
        return text

    def flush(self) -> str:
        """The end of the output: an unfinished character becomes U+FFFD."""
        tail, self._pending = self._pending, b""
        return tail.decode(errors="replace")


def _strict(piece: bytes) -> str | None:
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return None
