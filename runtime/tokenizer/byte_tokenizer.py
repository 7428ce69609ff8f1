"""The toy model's tokenizer: raw bytes, an end token and a few merges."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

from gapless.runtime.tokenizer.base import scalar_text
from gapless.runtime.tokenizer.pieces import TokenPieces

EOS_ID = 256
# The last three end inside a character: of most CJK text, of most emoji, of typographic quotes and dashes.
_MERGES = (b"th", b"the", b" a", b"in", b"\r\n", b"    ", b"\xe4\xb8", b"\xf0\x9f", b" \xe2\x80")


class ByteTokenizer:
    """Ids 0..255 are the bytes, 256 is EOS, then `_MERGES`; encoding takes the longest merge at each position.

    Each further id below `vocab_size` is its number in angle brackets ("<300>"): `encode` never gives one, but a
    model may emit any, and it must show in the text. There is no BOS, and no text means EOS.
    """

    bos_token_id: int | None = None
    eos_token_ids = frozenset({EOS_ID})
    special_ids = frozenset({EOS_ID})
    chat_template: str | None = None
    special_tokens: Mapping[str, str] = MappingProxyType({"eos_token": "<eos>"})

    def __init__(self, vocab_size: int = 512) -> None:
        first_merge = EOS_ID + 1
        first_unused = first_merge + len(_MERGES)
        if vocab_size < first_unused:
            raise ValueError(f"vocab_size is {vocab_size}; the byte tokenizer has {first_unused} ids")
        pieces = [bytes([value]) for value in range(256)]
        pieces += [b"<eos>", *_MERGES, *(b"<%d>" % unused for unused in range(first_unused, vocab_size))]
        self.vocab_size = vocab_size
        self.pieces = TokenPieces.of(pieces, self.special_ids)
        self._merges = sorted(enumerate(_MERGES, first_merge), key=lambda item: -len(item[1]))

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        data = scalar_text(text).encode()
        ids, position = [], 0
        while position < len(data):
            for token_id, merge in self._merges:
                if data.startswith(merge, position):
                    ids.append(token_id)
                    position += len(merge)
                    break
            else:
                ids.append(data[position])
                position += 1
        return ids

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]:
        return [self.encode(text) for text in texts]

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        return self.pieces.decode(ids, skip_special_tokens)
