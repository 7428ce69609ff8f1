"""Log probabilities in OpenAI's two shapes, from those of /generate."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Any

from gapless.runtime.core.messages import Finish
from gapless.runtime.tokenizer.pieces import TokenPieces
from gapless.tokenizer_manager.logprobs import Entry
from gapless.tokenizer_manager.states import RequestState

_LEAST = -9999.0  # OpenAI's for what cannot be: JSON has no infinity
Row = tuple[Entry, Sequence[Entry]]  # a token, and the best ones in its place


def output_rows(meta: dict[str, Any], state: RequestState, *, trimmed: bool) -> list[Row]:
    """Those of a /generate answer's output; without the stop token, where that is `trimmed` from the text."""
    rows = _rows(meta, "output")
    ended_by_token = state.finished is not None and state.finished.finish == Finish.STOP_TOKEN
    return rows[:-1] if ended_by_token and trimmed else rows


def prompt_rows(meta: dict[str, Any]) -> list[Row]:
    """Those of a /generate answer's prompt; its first token has no log probability."""
    return _rows(meta, "input")


def _rows(meta: dict[str, Any], side: str) -> list[Row]:
    tokens: list[Entry] = meta[f"{side}_token_logprobs"]
    best = meta.get(f"{side}_top_logprobs") or [None] * len(tokens)
    return [(token, others or ()) for token, others in zip(tokens, best, strict=True)]


def chat_logprobs(rows: Sequence[Row], pieces: TokenPieces) -> dict[str, Any]:
    """The `bytes` of all tokens together are the text's."""

    def entry(value: float | None, token_id: int, _: Any) -> dict[str, Any]:
        piece = pieces.piece(token_id)
        return {"token": _text(piece), "logprob": _finite(value), "bytes": list(piece)}

    content = [entry(*token) | {"top_logprobs": [entry(*best) for best in others]} for token, others in rows]
    return {"content": content, "refusal": None}


class CompletionLogprobs:
    """Those of one choice, chunk by chunk: a token's offset is how many characters of text come before it."""

    def __init__(self, pieces: TokenPieces, *, hides_special: bool) -> None:
        self._pieces, self._hides_special = pieces, hides_special
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._offset = 0

    def next(self, rows: Sequence[Row]) -> dict[str, Any]:
        made: dict[str, Any] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for (value, token_id, _), others in rows:
            made["tokens"].append(self._token(token_id))
            made["token_logprobs"].append(_finite(value))
            made["top_logprobs"].append(
                {self._token(best): _finite(score) for score, best, _ in others} or None
            )
            made["text_offset"].append(self._advance(token_id))
        return made

    def _advance(self, token_id: int) -> int:
        """The token's offset. One that goes on with a character is where the character is."""
        before = self._offset
        if self._hides_special and self._pieces.is_special(token_id):
            return before
        piece = self._pieces.piece(token_id)
        text = self._decoder.decode(piece)
        self._offset += len(text)
        whole = piece.decode(errors="replace")
        return self._offset - len(whole) if text.endswith(whole) else before

    def _token(self, token_id: int) -> str:
        return _text(self._pieces.piece(token_id))


def _text(piece: bytes) -> str:
    """A piece that is no text by itself is written as OpenAI writes it, so that no two pieces look the same."""
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)


def _finite(value: float | None) -> float | None:
    return None if value is None else max(value, _LEAST)
