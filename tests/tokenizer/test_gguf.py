"""Tokenizers from GGUF files, on tiny ones whose vocabularies are trained here."""

import io
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
from gguf import GGUFWriter
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from gapless.runtime.core.errors import ModelLoadError
from gapless.runtime.tokenizer.gguf_byte_level import PRE_TOKENIZERS
from gapless.runtime.tokenizer.gguf_sentencepiece import merges_of
from gapless.runtime.tokenizer.load import load_pieces, load_tokenizer

pytestmark = pytest.mark.usefixtures("own_cache")

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6


def write(path: Path, architecture: str = "llama", **values: Any) -> str:
    """A GGUF file with `tokenizer.ggml.KEY` for each of `values` (`chat_template` has no `ggml.`)."""
    writer = GGUFWriter(path, architecture)
    for key, value in values.items():
        name = "tokenizer.chat_template" if key == "chat_template" else f"tokenizer.ggml.{key}"
        add = {str: writer.add_string, bool: writer.add_bool, int: writer.add_uint32, list: writer.add_array}
        add[type(value)](name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return str(path)


def train_sentencepiece(texts: Sequence[str], dummy_prefix: bool) -> sentencepiece.SentencePieceProcessor:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(line for text in texts for line in text.split("\n") if line.isprintable()),
        model_writer=model,
        model_type="bpe",
        vocab_size=1400,
        byte_fallback=True,
        character_coverage=0.98,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        add_dummy_prefix=dummy_prefix,
        allow_whitespace_only_pieces=True,
        minloglevel=2,
    )
    return sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())


def sentencepiece_values(processor: sentencepiece.SentencePieceProcessor) -> dict[str, Any]:
    ids = range(processor.get_piece_size())

    def kind(i: int) -> int:
        if processor.is_control(i):
            return CONTROL
        return UNKNOWN if processor.is_unknown(i) else BYTE if processor.is_byte(i) else NORMAL

    return {
        "model": "llama",
        "tokens": [processor.id_to_piece(i) for i in ids],
        "scores": [processor.get_score(i) for i in ids],
        "token_type": [kind(i) for i in ids],
        "bos_token_id": processor.bos_id(),
        "eos_token_id": processor.eos_id(),
        "unknown_token_id": processor.unk_id(),
    }


@pytest.mark.parametrize("dummy_prefix", [True, False])
def test_sentencepiece_vocabulary_gives_sentencepieces_ids(
    tmp_path: Path, texts: list[str], dummy_prefix: bool
) -> None:
    processor = train_sentencepiece(texts, dummy_prefix)
    path = write(tmp_path / "m.gguf", add_space_prefix=dummy_prefix, **sentencepiece_values(processor))
    tokenizer = load_tokenizer(path)
    for text in texts:
        if re.search("</?s>|<unk>", text):  # which sentencepiece does not find in a text, and llama.cpp does
            continue
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert ids == processor.encode(text)
        assert tokenizer.decode(ids) == " " * (dummy_prefix and bool(text)) + text.replace("▁", " ")


def test_sentencepiece_defaults_are_a_prefix_space_and_bos(tmp_path: Path, texts: list[str]) -> None:
    processor = train_sentencepiece(texts, dummy_prefix=True)
    path = write(tmp_path / "m.gguf", **sentencepiece_values(processor))
    tokenizer = load_tokenizer(path)
    assert tokenizer.encode("the<s>the</s>") == [1, *processor.encode("the"), 1, *processor.encode("the"), 2]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids, tokenizer.special_ids) == (1, {2}, {0, 1, 2})


def test_gemma_joins_pieces_in_the_order_of_ids_whatever_the_scores(tmp_path: Path) -> None:
    tokens = ["<unk>", "a", "b", "c", "ab", "bc"]
    values: dict[str, Any] = {"model": "llama", "tokens": tokens, "scores": [0.0] * 5 + [9.0]}
    for architecture, expected in (("llama", [1, 5]), ("gemma3", [4, 3])):
        path = write(tmp_path / architecture, architecture, add_space_prefix=False, **values)
        assert load_tokenizer(path).encode("abc", add_special_tokens=False) == expected


def test_merges_come_by_score_then_length_of_the_left_part_then_id() -> None:
    tokens = ["a", "b", "aa", "ab", "aaa", "ba"]
    assert merges_of(tokens, [0, 0, -1, -2, -1, -2]) == [
        ("aa", "a"),
        ("a", "aa"),
        ("a", "a"),
        ("a", "b"),
        ("b", "a"),
    ]


def test_user_defined_tokens_are_found_whole_and_are_not_special(tmp_path: Path) -> None:
    tokens = ["<unk>", "a", "\n", "  ", "▁", "<end>", "x y"]
    kinds = [UNKNOWN, NORMAL, USER_DEFINED, USER_DEFINED, NORMAL, CONTROL, USER_DEFINED]
    path = write(
        tmp_path / "m", "gemma3", model="llama", tokens=tokens, token_type=kinds, add_space_prefix=False
    )
    tokenizer = load_tokenizer(path)
    ids = tokenizer.encode("a\na  a<end>x y a", add_special_tokens=False)
    assert ids == [1, 2, 1, 3, 1, 5, 6, 4, 1]
    assert tokenizer.decode(ids) == "a\na  ax y a"
    assert tokenizer.special_ids == {0, 5}


def train_byte_level(texts: Sequence[str], pre: str) -> Tokenizer:
    """What the model's own tokenizer.json would be."""
    kind = PRE_TOKENIZERS[pre]
    tokenizer = Tokenizer(models.BPE(ignore_merges=kind.ignore_merges))
    cuts = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in kind.patterns]
    letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*cuts, letters])
    if kind.nfc:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=700, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens(["<|begin|>", "<｜end▁of▁text｜>"])
    return tokenizer


def byte_level_values(library: Tokenizer, pre: str) -> dict[str, Any]:
    vocab = library.get_vocab()
    tokens = sorted(vocab, key=vocab.__getitem__)
    merges = json.loads(library.to_str())["model"]["merges"]
    return {
        "model": "gpt2",
        "pre": pre,
        "tokens": tokens,
        "token_type": [NORMAL] * (len(tokens) - 2) + [CONTROL] * 2,
        "merges": [" ".join(merge) for merge in merges],
        "bos_token_id": len(tokens) - 2,
        "eos_token_id": len(tokens) - 1,
    }


@pytest.mark.parametrize("pre", sorted(PRE_TOKENIZERS))
def test_byte_level_vocabulary_gives_the_librarys_ids(tmp_path: Path, texts: list[str], pre: str) -> None:
    library = train_byte_level(texts, pre)
    path = write(tmp_path / "m.gguf", **byte_level_values(library, pre))
    tokenizer, pieces = load_tokenizer(path), load_pieces(path)
    for text in [*texts, "a<|begin|>b<｜end▁of▁text｜>"]:
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert ids == library.encode(text).ids
        assert pieces.decode(ids, skip_special_tokens=False) == library.decode(ids, skip_special_tokens=False)
    assert tokenizer.special_ids == {tokenizer.bos_token_id, *tokenizer.eos_token_ids}


@pytest.mark.parametrize(
    ("pre", "text", "expected"),
    [
        ("llama-bpe", "a 12345  b'LL\n\n x", ["a", " ", "123", "45", " ", " b", "'LL", "\n\n", " x"]),
        ("qwen2", "a 123  b'LL\n\n x", ["a", " ", "1", "2", "3", " ", " b", "'LL", "\n\n", " x"]),
        ("gpt-2", "a 123  b'll\n\n x", ["a", " 123", " ", " b", "'ll", "\n\n", " x"]),
        ("default", "a 1234+=b 'x", ["a", " ", "123", "4", "+=", "b", " ", "'", "x"]),
    ],
)
def test_text_is_cut_as_the_pre_tokenizer_says(pre: str, text: str, expected: list[str]) -> None:
    cuts = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in PRE_TOKENIZERS[pre].patterns]
    assert [word for word, _ in pre_tokenizers.Sequence(cuts).pre_tokenize_str(text)] == expected


@pytest.mark.parametrize(
    ("pre", "flags", "bos", "eos"),
    [
        ("llama-bpe", {}, True, False),
        ("llama-bpe", {"add_bos_token": False}, False, False),
        ("qwen2", {}, False, False),
        ("qwen2", {"add_bos_token": True, "add_eos_token": True}, True, True),
    ],
)
def test_bos_and_eos_are_added_as_the_file_says(
    tmp_path: Path, texts: list[str], pre: str, flags: dict[str, bool], bos: bool, eos: bool
) -> None:
    values = byte_level_values(train_byte_level(texts, pre), pre)
    tokenizer = load_tokenizer(write(tmp_path / "m.gguf", **values, **flags))
    begin, end = [values["bos_token_id"]] * bos, [values["eos_token_id"]] * eos
    assert tokenizer.encode("a") == [*begin, *tokenizer.encode("a", add_special_tokens=False), *end]


def test_every_end_token_and_the_chat_template_are_read(tmp_path: Path, texts: list[str]) -> None:
    values = byte_level_values(train_byte_level(texts, "qwen2"), "qwen2")
    path = write(tmp_path / "m.gguf", eot_token_id=5, eom_token_id=5, chat_template="{{ m }}", **values)
    tokenizer = load_tokenizer(path)
    assert tokenizer.eos_token_ids == {5, values["eos_token_id"]}
    assert tokenizer.chat_template == "{{ m }}"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": "t5"}, "tokenizer.ggml.model is 't5'"),
        ({"model": "gpt2", "pre": "novel"}, "tokenizer.ggml.pre is 'novel'; known are default"),
        ({"model": "gpt2"}, "tokenizer.ggml.merges is missing"),
        ({"tokens": ["a", "a"]}, "tokenizer.ggml.tokens has the same token more than once"),
        ({"tokens": [1, 2]}, "tokenizer.ggml.tokens is not a list of UTF-8 strings"),
        ({"tokens": [b"\xff", b"a"]}, "tokenizer.ggml.tokens is not a list of UTF-8 strings"),
        ({"scores": [0.0]}, "tokenizer.ggml.scores has 1 entries for 2 tokens"),
        ({"token_type": 1}, "cannot use the tokenizer"),
        ({"bos_token_id": 2}, "tokenizer.ggml.bos_token_id is 2, outside the vocabulary of 2"),
        ({"model": "gpt2", "merges": ["a b"]}, "the tokenizer of .* is damaged"),
    ],
)
def test_a_wrong_vocabulary_is_one_error_that_names_file_and_key(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    values = {"model": "llama", "tokens": ["<unk>", "a"], **change}
    path = write(tmp_path / "m.gguf", **values)
    with pytest.raises(ModelLoadError, match=message) as caught:
        load_tokenizer(path)
    assert path in caught.value.message


def test_a_file_without_a_vocabulary_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"tokenizer\.ggml\.tokens is missing"):
        load_pieces(write(tmp_path / "m.gguf", model="llama"))
