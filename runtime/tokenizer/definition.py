"""A tokenizer before it is loaded: the tokenizers library's JSON, and the facts that have no place in it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from gapless.runtime.tokenizer.pieces import TokenPieces
from gapless.runtime.tokenizer.spelling import byte_level_piece, sentencepiece_piece

_SENTENCEPIECE_DECODERS = {"Replace", "ByteFallback", "Metaspace", "Fuse", "Strip"}


@dataclass(frozen=True)
class Facts:
    bos_token_id: int | None
    eos_token_ids: list[int]
    chat_template: str | None
    special_tokens: dict[str, str]


@dataclass(frozen=True)
class Definition:
    """`spec` is the content of a tokenizer.json."""

    spec: dict[str, Any]
    facts: Facts

    def pieces(self) -> TokenPieces:
        """Every id's bytes, by the rules of the spec's decoder; raises ValueError where it is of a kind unknown here.

        The decoder's Strip step, which drops the space that a SentencePiece model puts before a text, is left
        out: generated tokens stand in the middle of a text, and there the space is real.
        """
        vocab = self.spec["model"]["vocab"]
        if isinstance(vocab, list):  # Unigram: [piece, score] in the order of ids
            vocab = {piece: index for index, (piece, _) in enumerate(vocab)}
        spell = _spelling(self.spec.get("decoder"))
        by_id = {index: spell(token) for token, index in vocab.items()}
        # In a byte-level vocabulary, added tokens alone are written as plain text.
        spell_added = str.encode if spell is byte_level_piece else spell
        special = {*self.facts.eos_token_ids}
        for token in self.spec.get("added_tokens") or []:
            by_id[token["id"]] = spell_added(token["content"])
            if token["special"]:
                special.add(token["id"])
        return TokenPieces.of([by_id.get(i, b"") for i in range(max(by_id) + 1)], special)


def _spelling(decoder: dict[str, Any] | None) -> Callable[[str], bytes]:
    kinds = set(_decoder_types(decoder))
    if "ByteLevel" in kinds:
        return byte_level_piece
    if kinds and kinds <= _SENTENCEPIECE_DECODERS:
        return sentencepiece_piece
    raise ValueError(f"its decoder is neither byte-level nor SentencePiece-like: {sorted(kinds) or 'absent'}")


def _decoder_types(decoder: dict[str, Any] | None) -> Iterator[str]:
    if decoder is None:
        return
    if decoder["type"] == "Sequence":
        for step in decoder["decoders"]:
            yield from _decoder_types(step)
    else:
        yield decoder["type"]
