"""Byte-level BPE vocabularies in GGUF files (`tokenizer.ggml.model` is "gpt2": Llama 3, Qwen)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gapless.runtime.core.errors import ModelLoadError
from gapless.runtime.tokenizer.gguf_vocabulary import GGUFVocabulary


@dataclass(frozen=True)
class PreTokenizer:
    """How a text is cut before merging: by each pattern in turn. The patterns are the models' own."""

    patterns: tuple[str, ...]
    nfc: bool = False  # the text is normalised first
    ignore_merges: bool = False  # a cut that is a token by itself stays whole
    add_bos: bool = False  # where the file does not say


_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CONTRACTION_OR_WORD = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_OTHER = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = PreTokenizer(
    (rf"{_CONTRACTION_OR_WORD}|\p{{N}}{{1,3}}|{_OTHER}",), ignore_merges=True, add_bos=True
)
_QWEN2 = PreTokenizer((rf"{_CONTRACTION_OR_WORD}|\p{{N}}|{_OTHER}",), nfc=True)

# By `tokenizer.ggml.pre`; "default" is what llama.cpp does for files older than that key.
PRE_TOKENIZERS = {
    "default": PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")),
    "gpt-2": PreTokenizer((_GPT2,)),
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
}


def pre_tokenizer_of(vocabulary: GGUFVocabulary) -> PreTokenizer:
    name = vocabulary.get("pre", "default")
    if name not in PRE_TOKENIZERS:
        known = ", ".join(PRE_TOKENIZERS)
        raise ModelLoadError(
            f"GGUF file {vocabulary.path}: tokenizer.ggml.pre is {name!r}; known are {known}"
        )
    return PRE_TOKENIZERS[name]


def byte_level_spec(vocabulary: GGUFVocabulary) -> dict[str, Any]:
    """The tokenizer.json of byte-level BPE."""
    pre = pre_tokenizer_of(vocabulary)
    cuts = [
        {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
        for pattern in pre.patterns
    ]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return {
        "version": "1.0",
        "added_tokens": vocabulary.added_tokens(),
        "normalizer": {"type": "NFC"} if pre.nfc else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*cuts, byte_level]},
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "ignore_merges": pre.ignore_merges,
            "vocab": {token: index for index, token in enumerate(vocabulary.tokens)},
            "merges": [merge.split(" ") for merge in vocabulary.strings("merges")],
        },
    }
