"""Finds a model's tokenizer, and keeps the form that loads fastest in the cache.

A cache entry holds tokenizer.json as the tokenizers library reads it, the pieces, and the other facts, so that
neither a GGUF vocabulary's merges nor the pieces are derived twice.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import orjson

from gapless.runtime.core.cache import cached_dir, file_key
from gapless.runtime.core.errors import ModelLoadError
from gapless.runtime.core.model_path import ModelSource, resolve_model_path
from gapless.runtime.tokenizer import gguf, hf
from gapless.runtime.tokenizer.base import Tokenizer
from gapless.runtime.tokenizer.byte_tokenizer import ByteTokenizer
from gapless.runtime.tokenizer.definition import Definition, Facts
from gapless.runtime.tokenizer.pieces import TokenPieces

_VERSION = 2  # of the entry's content: a change to how it is derived needs another


def load_tokenizer(model_path: str) -> Tokenizer:
    """The tokenizer of `--model-path`; raises ModelLoadError naming the file at fault."""
    source = resolve_model_path(model_path)
    if source.kind == "toy":
        return ByteTokenizer()
    from gapless.runtime.tokenizer.fast import FastTokenizer

    entry = _entry(source)
    facts, pieces = Facts(**orjson.loads((entry / "facts.json").read_bytes())), TokenPieces.load(entry)
    try:
        return FastTokenizer(entry / "tokenizer.json", facts, pieces)
    except Exception as error:  # the library raises nothing narrower
        raise ModelLoadError(f"the tokenizer of {source.path} is damaged: {error}") from error


def load_pieces(model_path: str) -> TokenPieces:
    """The bytes of every id, without the tokenizers library; raises ModelLoadError naming the file at fault."""
    source = resolve_model_path(model_path)
    return ByteTokenizer().pieces if source.kind == "toy" else TokenPieces.load(_entry(source))


def _entry(source: ModelSource) -> Path:
    read_definition: Callable[[Path], Definition]
    if source.kind == "hf":
        read_definition, files = hf.read_definition, [source.path / name for name in hf.FILES]
    else:
        read_definition, files = gguf.read_definition, [source.path]

    def build(directory: Path) -> None:
        try:
            definition = read_definition(source.path)
            definition.pieces().save(directory)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ModelLoadError(f"cannot use the tokenizer of {source.path}: {error!r}") from error
        (directory / "tokenizer.json").write_bytes(orjson.dumps(definition.spec))
        (directory / "facts.json").write_bytes(orjson.dumps(asdict(definition.facts)))

    identity = [file_key(path=file) for file in files if file.is_file()]
    return cached_dir("tokenizer", file_key(_VERSION, source.kind, *identity), build)
