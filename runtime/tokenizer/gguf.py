"""A tokenizer from the vocabulary inside a GGUF file: keys and defaults as in llama.cpp, which defines the format."""

from __future__ import annotations

from pathlib import Path

from gapless.runtime.core.errors import ModelLoadError
from gapless.runtime.tokenizer.definition import Definition, Facts, affixes
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
    bos = vocabulary.token("bos")
    ends = [token for role in ("eos", "eot", "eom") if (token := vocabulary.token(role))]
    spec["post_processor"] = affixes(
        bos if vocabulary.get("add_bos_token", adds_bos) else None,
        vocabulary.token("eos") if vocabulary.get("add_eos_token", False) else None,
    )
    end_ids = list(dict.fromkeys(token_id for _, token_id in ends))
    return Definition(
        spec,
        Facts(bos[1] if bos else None, end_ids, vocabulary.metadata.get("tokenizer.chat_template")),
    )
