"""A tokenizer from the vocabulary inside a GGUF file: keys and defaults as in llama.cpp, which defines the format."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gapless.runtime.core.errors import ModelLoadError
from gapless.runtime.tokenizer.definition import Definition, Facts
from gapless.runtime.tokenizer.gguf_byte_level import byte_level_spec, pre_tokenizer_of
from gapless.runtime.tokenizer.gguf_sentencepiece import sentencepiece_spec
from gapless.runtime.tokenizer.gguf_vocabulary import GGUFVocabulary


def read_definition(path: Path) -> Definition:
    """Raises ModelLoadError naming the file and the metadata key that is missing, wrong or unknown."""
    vocabulary = GGUFVocabulary(path)
    model = vocabulary.get("model")
    if model == "llama":
        spec, adds_bos = sentencepiece_spec(vocabulary), True
    elif model == "gpt2":
        spec, adds_bos = byte_level_spec(vocabulary), pre_tokenizer_of(vocabulary).add_bos
    else:
        raise ModelLoadError(
            f"GGUF file {path}: tokenizer.ggml.model is {model!r}; known are 'llama' and 'gpt2'"
        )
    if len(spec["model"]["vocab"]) < len(vocabulary.tokens):
        raise ModelLoadError(f"GGUF file {path}: tokenizer.ggml.tokens has the same token more than once")
    bos = vocabulary.token("bos")
    ends = {token[1] for role in ("eos", "eot", "eom") if (token := vocabulary.token(role))}
    spec["post_processor"] = _affixes(
        bos if vocabulary.get("add_bos_token", adds_bos) else None,
        vocabulary.token("eos") if vocabulary.get("add_eos_token", False) else None,
    )
    chat_template = vocabulary.metadata.get("tokenizer.chat_template")
    special = {f"{role}_token": token[0] for role in ("bos", "eos") if (token := vocabulary.token(role))}
    return Definition(spec, Facts(bos[1] if bos else None, sorted(ends), chat_template, special))


def _affixes(bos: tuple[str, int] | None, eos: tuple[str, int] | None) -> dict[str, Any]:
    """The post-processor that puts `bos` before and `eos` after a text, each a (token, id) or absent."""

    def special(token: tuple[str, int] | None) -> list[dict[str, Any]]:
        return [{"SpecialToken": {"id": token[0], "type_id": 0}}] if token else []

    def sequence(name: str) -> list[dict[str, Any]]:
        return [*special(bos), {"Sequence": {"id": name, "type_id": 0}}, *special(eos)]

    return {
        "type": "TemplateProcessing",
        "single": sequence("A"),
        "pair": [*sequence("A"), *sequence("B")],
        "special_tokens": {t[0]: {"id": t[0], "ids": [t[1]], "tokens": [t[0]]} for t in (bos, eos) if t},
    }
