"""Every way of tokenizing what a grammar accepts gets through its masks, in each family of vocabularies."""

from __future__ import annotations

import functools
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from llguidance import LLMatcher, LLTokenizer
from tokenizer_files import byte_level, save, sentencepiece_like

from gapless.runtime.core.grammar_text import to_lark
from gapless.runtime.tokenizer.base import Tokenizer
from gapless.runtime.tokenizer.byte_tokenizer import ByteTokenizer
from gapless.runtime.tokenizer.grammar_vocabulary import grammar_tokenizer
from gapless.runtime.tokenizer.load import load_tokenizer

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "tags": {"type": "array", "items": {"type": "string"}},
        "size": {"type": ["number", "null"]},
    },
    "required": ["name", "tags", "size"],
    "additionalProperties": False,
}
LARK = to_lark("json_schema", json.dumps(SCHEMA))
VALUES = [
    {"name": "the thing in a box", "tags": [], "size": 1.5},
    {"name": "Zoë 漢字 😀", "tags": ["a b", "<|end|>", "</s>"], "size": None},
    {"name": "", "tags": ["x" * 40], "size": -3},
]


@pytest.fixture(scope="module", params=["bytes", "demo", "byte-level", "sentencepiece"])
def vocabulary(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Tokenizer, LLTokenizer]:
    if request.param == "bytes":
        tokenizer: Tokenizer = ByteTokenizer()
    elif request.param == "demo":
        tokenizer = load_tokenizer("demo")
    else:
        texts = [json.dumps(value, ensure_ascii=False) for value in VALUES] * 3
        make = byte_level if request.param == "byte-level" else sentencepiece_like
        directory: Path = tmp_path_factory.mktemp("model")
        tokenizer = load_tokenizer(save(directory, make(texts)))
    return tokenizer, grammar_tokenizer(tokenizer.pieces)


def passes(vocabulary: LLTokenizer, ids: list[int]) -> bool:
    """Whether each id is in the mask before it, and the end in the last mask."""
    matcher = LLMatcher(vocabulary, LARK, log_level=0)
    for token in [*ids, vocabulary.eos_token]:
        mask = np.frombuffer(matcher.compute_bitmask(), np.int32)
        if not mask[token // 32] >> (token % 32) & 1:
            return False
        if token != vocabulary.eos_token:
            assert matcher.consume_token(token)
    return True


@functools.cache
def ids_of_pieces(tokenizer: Tokenizer) -> dict[bytes, list[int]]:
    pieces, found = tokenizer.pieces, dict[bytes, list[int]]()
    for token in range(len(pieces)):
        if not pieces.is_special(token):
            found.setdefault(pieces.piece(token), []).append(token)
    return found


def random_spelling(tokenizer: Tokenizer, text: bytes, rng: random.Random) -> list[int]:
    """Ids whose pieces join to `text`, cut anywhere that the vocabulary allows."""
    by_piece = ids_of_pieces(tokenizer)
    ids, at = [], 0
    while at < len(text):
        fits = [text[at:end] for end in range(at + 1, len(text) + 1) if text[at:end] in by_piece]
        piece = rng.choice(fits)
        ids.append(rng.choice(by_piece[piece]))
        at += len(piece)
    return ids


def test_the_models_own_tokens_may_come(vocabulary: tuple[Tokenizer, LLTokenizer]) -> None:
    tokenizer, trie = vocabulary
    assert trie.vocab_size == len(tokenizer.pieces) + 1
    for value in VALUES:
        ids = tokenizer.encode(json.dumps(value, ensure_ascii=False), add_special_tokens=False)
        if not any(tokenizer.pieces.is_special(token) for token in ids):
            assert passes(trie, ids)


def test_any_other_spelling_may_come(vocabulary: tuple[Tokenizer, LLTokenizer]) -> None:
    tokenizer, trie = vocabulary
    rng = random.Random(5)
    for value in VALUES:
        for _ in range(3):
            assert passes(
                trie, random_spelling(tokenizer, json.dumps(value, ensure_ascii=False).encode(), rng)
            )


def test_a_cut_or_wrong_text_does_not_pass(vocabulary: tuple[Tokenizer, LLTokenizer]) -> None:
    tokenizer, trie = vocabulary
    rng = random.Random(5)
    for text in ('{"name": "a"', '{"name": 1', '{"tags": []}', '{"name":  "a"', "[]"):
        assert not passes(trie, random_spelling(tokenizer, text.encode(), rng))


def test_special_tokens_never_come(vocabulary: tuple[Tokenizer, LLTokenizer]) -> None:
    """Not even inside a string, where their text might."""
    tokenizer, trie = vocabulary
    matcher = LLMatcher(trie, LARK, log_level=0)
    for token in random_spelling(tokenizer, b'{"name": "a', random.Random(5)):
        assert matcher.consume_token(token)
    bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
    special = tokenizer.pieces.special.nonzero()[0]
    assert special.size
    assert not bits[special].any()
    assert bits[: len(tokenizer.pieces)].sum() > len(tokenizer.pieces) // 8
