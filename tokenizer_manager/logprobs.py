"""The log probabilities that a request has gained, in SGLang's shapes."""

from __future__ import annotations

from itertools import repeat
from typing import Any

import numpy as np

from gapless.runtime.core.logprobs import LogprobParams, Logprobs
from gapless.runtime.core.messages import int32s
from gapless.runtime.tokenizer.pieces import TokenPieces

Entry = tuple[float | None, int, str | None]  # log probability, id, text where asked for


class Entries:
    """Of tokens in a row. `top` and `chosen` have a list for each token, where they are asked for.

    The first token of a prompt follows nothing: its log probability is None, and so are its lists.
    """

    def __init__(self) -> None:
        self.tokens: list[Entry] = []
        self.top: list[list[Entry] | None] = []
        self.chosen: list[list[Entry] | None] = []


class RequestLogprobs:
    """Those of one sample: `prompt` has the prompt's tokens from the start that was asked for, `output` its own."""

    def __init__(self, params: LogprobParams, input_ids: bytes, pieces: TokenPieces | None) -> None:
        """`pieces` where texts are asked for."""
        self.params = params
        self.prompt, self.output = Entries(), Entries()
        self.sent_prompt = 0  # entries, in the events so far
        self._ids = int32s(input_ids)[params.start :].tolist()
        self._pieces = pieces
        if params.start == 0:
            self.prompt.tokens += self._entries([None], self._ids[:1])
            self.prompt.top.append(None)
            self.prompt.chosen.append(None)

    def add_prompt(self, found: Logprobs) -> None:
        self._add(self.prompt, found, self._ids)

    def add_output(self, found: Logprobs, ids: list[int]) -> None:
        """`ids` are all output ids so far, those of `found` and more perhaps."""
        self._add(self.output, found, ids)

    def fields(self, first_prompt: int, first_output: int) -> dict[str, Any]:
        """Of meta_info: what came after so many entries."""
        fields: dict[str, Any] = {}
        for name, entries, first in (
            ("input", self.prompt, first_prompt),
            ("output", self.output, first_output),
        ):
            fields[f"{name}_token_logprobs"] = entries.tokens[first:]
            if self.params.top:
                fields[f"{name}_top_logprobs"] = entries.top[first:]
            if self.params.ids:
                fields[f"{name}_token_ids_logprobs"] = entries.chosen[first:]
        return fields

    def _add(self, entries: Entries, found: Logprobs, ids: list[int]) -> None:
        values, params = _floats(found.values), self.params
        begin, count = len(entries.tokens), len(values)
        entries.tokens += self._entries(values, ids[begin : begin + count])
        if params.top:
            best, best_ids = _floats(found.top), int32s(found.top_ids).tolist()
            rows = self._entries(best, best_ids)
            entries.top += (rows[i : i + params.top] for i in range(0, len(rows), params.top))
        if params.ids:
            rows = self._entries(_floats(found.chosen), list(params.ids) * count)
            entries.chosen += (rows[i : i + len(params.ids)] for i in range(0, len(rows), len(params.ids)))

    def _entries(self, values: list[float | None], ids: list[int]) -> list[Entry]:
        pieces = self._pieces
        if pieces is None:
            return list(zip(values, ids, repeat(None), strict=False))
        return [
            (value, i, pieces.piece(i).decode(errors="replace")) for value, i in zip(values, ids, strict=True)
        ]


def _floats(data: bytes) -> list[float | None]:
    values: list[float | None] = np.frombuffer(data, "<f4").tolist()
    return values
