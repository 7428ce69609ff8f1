"""SentencePiece vocabularies in GGUF files (`tokenizer.ggml.model` is "llama": Llama 2, Mistral, Gemma)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gapless.runtime.tokenizer.gguf_vocabulary import GGUFVocabulary
from gapless.runtime.tokenizer.spelling import SPACE

# The scores in their files do not follow the order in which pieces were merged; the ids do.
_MERGED_IN_ID_ORDER = {"gemma", "gemma2", "gemma3"}


def sentencepiece_spec(vocabulary: GGUFVocabulary) -> dict[str, Any]:
    """The tokenizer.json of byte-fallback BPE that joins the pieces as SentencePiece's own BPE does."""
    # Runs of spaces are stored as spaces, while the text to match has been respelled.
    tokens = [SPACE * len(t) if t and not t.strip(" ") else t for t in vocabulary.tokens]
    if vocabulary.metadata.get("general.architecture") in _MERGED_IN_ID_ORDER:
        scores: Sequence[float] = range(0, -len(tokens), -1)
    else:
        scores = vocabulary.numbers("scores", default=0.0)
    normalizers: list[dict[str, Any]] = [{"type": "Replace", "pattern": {"String": " "}, "content": SPACE}]
    if vocabulary.get("add_space_prefix", True):
        normalizers.insert(0, {"type": "Prepend", "prepend": SPACE})
    unknown = vocabulary.token("unknown")
    return {
        "version": "1.0",
        "added_tokens": [t for t in vocabulary.added_tokens() if t["content"] == tokens[t["id"]]],
        "normalizer": {"type": "Sequence", "normalizers": normalizers},
        "decoder": {"type": "Sequence", "decoders": [
            {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
            {"type": "ByteFallback"},
            {"type": "Fuse"},
        ]},
        "model": {
            "type": "BPE",
            "unk_token": unknown[0] if unknown else None,
            "fuse_unk": True,
            "byte_fallback": True,
            "vocab": {token: index for index, token in enumerate(tokens)},
            "merges": merges_of(tokens, scores),
        },
    }  # fmt: skip


def merges_of(tokens: Sequence[str], scores: Sequence[float]) -> list[tuple[str, str]]:
    """Every pair of tokens that joins to a token, in the order in which BPE has to apply them.

    That is by the joined token's score, best first, then by the length of the left part and of the right, longest
    first, then by the joined token's id: transformers' order for a vocabulary that comes without merges.
    """
    known = set(tokens)
    pairs = [
        (-score, -cut, cut - len(token), token[:cut], token[cut:])
        for token, score in zip(tokens, scores, strict=True)
        for cut in range(len(token) - 1, 0, -1)
        if token[:cut] in known and token[cut:] in known
    ]
    pairs.sort(key=lambda pair: pair[:3])
    return [pair[3:] for pair in pairs]
