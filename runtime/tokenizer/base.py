"""What the rest of the runtime sees of a tokenizer, whatever files it came from."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from gapless.runtime.tokenizer.pieces import TokenPieces


class Tokenizer(Protocol):
    """Thread-safe. `encode` takes any str: a lone surrogate counts as U+FFFD."""

    vocab_size: int
    bos_token_id: int | None
    eos_token_ids: frozenset[int]  # the tokenizer's own; a model's configuration may name more
    special_ids: frozenset[int]
    chat_template: str | None  # Jinja source
    special_tokens: Mapping[str, str]  # what chat templates read by the names bos_token, eos_token, ...
    pieces: TokenPieces

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]: ...

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str: ...


def scalar_text(text: str) -> str:
    """`text` with surrogate pairs joined and lone surrogates replaced by U+FFFD, so that it has a UTF-8 form.

    JSON can carry half of a pair ("\\ud83d"), which Python keeps as a str that no encoder accepts.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text
