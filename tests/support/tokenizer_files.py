"""Tiny Hugging Face tokenizers of the two families, made by the tokenizers library."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers


def byte_level(texts: list[str]) -> Tokenizer:
    """As Llama 3 and Qwen have it."""
    tokenizer = Tokenizer(models.BPE())
    cut = pre_tokenizers.Split(Regex(r" ?\p{L}+|\p{N}{1,3}|\s+|[^\s\p{L}\p{N}]+"), "isolated")
    letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([cut, letters])
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|begin|>", "<|end|>", "<｜sep▁｜>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_tokens(["<tool>"])
    tokenizer.post_processor = processors.TemplateProcessing("<|begin|> $A", None, [("<|begin|>", 0)])
    return tokenizer


def sentencepiece_like(texts: list[str]) -> Tokenizer:
    """As Llama 2, Mistral and Gemma have it."""
    vocab = {"<unk>": 0, "<|begin|>": 1, "<|end|>": 2, **{f"<0x{i:02X}>": i + 3 for i in range(256)}}
    letters = dict.fromkeys("▁" + "".join(texts[:30]).replace(" ", ""))
    joined = ["th", "the", "▁the", "▁▁"]
    for token in [*letters, *joined]:
        vocab.setdefault(token, len(vocab))
    merges = [("t", "h"), ("th", "e"), ("▁", "the"), ("▁", "▁")]
    tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer.add_special_tokens(["<unk>", "<|begin|>", "<|end|>"])
    tokenizer.add_tokens(["<tool>"])
    return tokenizer


def save(directory: Path, tokenizer: Tokenizer, **config: Any) -> str:
    (directory / "config.json").write_text(json.dumps({"model_type": "llama"}))
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|end|>", **config}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return str(directory)
