"""The vocabulary in a GGUF file's metadata, checked."""

from __future__ import annotations

from enum import IntEnum
from pathlib import Path
from typing import Any

from gapless.runtime.core.errors import ModelLoadError
from gapless.runtime.core.gguf import read_gguf

_PREFIX = "tokenizer.ggml."


class TokenType(IntEnum):
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


class GGUFVocabulary:
    """`tokens` and `types` have one entry an id. Every method raises ModelLoadError naming the file and the key."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metadata = read_gguf(path).metadata
        self.tokens = self.strings("tokens")
        self.types = self.numbers("token_type", default=int(TokenType.NORMAL))

    def get(self, key: str, default: Any = None) -> Any:
        return self.metadata.get(_PREFIX + key, default)

    def strings(self, key: str) -> list[str]:
        try:
            return [entry.decode() for entry in self.metadata[_PREFIX + key]]
        except KeyError as error:
            raise self._error(key, "is missing") from error
        except (AttributeError, TypeError, UnicodeDecodeError) as error:
            raise self._error(key, f"is not a list of UTF-8 strings: {error}") from error

    def numbers(self, key: str, default: float) -> list[Any]:
        """One number a token, all `default` where the file has none."""
        values = self.get(key)
        if values is None:
            return [default] * len(self.tokens)
        if len(values) != len(self.tokens):
            raise self._error(key, f"has {len(values)} entries for {len(self.tokens)} tokens")
        return list(values.tolist())

    def token(self, role: str) -> tuple[str, int] | None:
        """The (token, id) of a role: "bos", "eos", "eot", "eom" or "unknown"."""
        key = f"{role}_token_id"
        token_id = self.get(key)
        if token_id is None:
            return None
        if not 0 <= token_id < len(self.tokens):
            raise self._error(key, f"is {token_id}, outside the vocabulary of {len(self.tokens)}")
        return self.tokens[token_id], token_id

    def added_tokens(self) -> list[dict[str, Any]]:
        """The tokens found whole in a text before anything else, as tokenizer.json lists them."""
        special = {TokenType.CONTROL, TokenType.UNKNOWN}
        flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
        return [
            {"id": index, "content": token, **flags, "special": kind in special}
            for index, (token, kind) in enumerate(zip(self.tokens, self.types, strict=True))
            if kind in special or kind == TokenType.USER_DEFINED
        ]

    def _error(self, key: str, problem: str) -> ModelLoadError:
        return ModelLoadError(f"GGUF file {self.path}: {_PREFIX}{key} {problem}")
