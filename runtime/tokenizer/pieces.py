"""The bytes behind every token id: what the detokenizer needs, without the tokenizers library."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class TokenPieces:
    """The vocabulary's pieces end to end: id i is `blob[offsets[i]:offsets[i + 1]]`.

    Text is the UTF-8 decoding of joined pieces. A single piece need not be valid UTF-8, and one that starts a
    SentencePiece word starts with its space.
    """

    blob: bytes
    offsets: NDArray[np.int64]  # [V + 1]
    special: NDArray[np.bool_]  # [V], true for ids that skip_special_tokens hides

    @classmethod
    def of(cls, pieces: Sequence[bytes], special_ids: Iterable[int]) -> Self:
        offsets = np.zeros(len(pieces) + 1, np.int64)
        np.cumsum([len(piece) for piece in pieces], out=offsets[1:])
        special = np.zeros(len(pieces), np.bool_)
        special[list(special_ids)] = True
        return cls(b"".join(pieces), offsets, special)

    def __len__(self) -> int:
        return len(self.special)

    def piece(self, token_id: int) -> bytes:
        """The id's bytes; empty outside the vocabulary, since a model may have more embedding rows than ids."""
        if not 0 <= token_id < len(self):
            return b""
        return self.blob[self.offsets[token_id] : self.offsets[token_id + 1]]

    def is_special(self, token_id: int) -> bool:
        return 0 <= token_id < len(self) and bool(self.special[token_id])

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """Finished text of `ids`; bytes that are not UTF-8 become U+FFFD."""
        shown = (i for i in ids if not (skip_special_tokens and self.is_special(i)))
        return b"".join(map(self.piece, shown)).decode(errors="replace")

    def save(self, directory: Path) -> None:
        (directory / "pieces.bin").write_bytes(self.blob)
        np.save(directory / "offsets.npy", self.offsets, allow_pickle=False)
        np.save(directory / "special.npy", self.special, allow_pickle=False)

    @classmethod
    def load(cls, directory: Path) -> Self:
        return cls(
            (directory / "pieces.bin").read_bytes(),
            np.load(directory / "offsets.npy", allow_pickle=False),
            np.load(directory / "special.npy", allow_pickle=False),
        )
