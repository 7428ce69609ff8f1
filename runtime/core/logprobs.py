"""Log probabilities and embeddings: what a request asks for, what a step is asked for, and what comes of it.

The log probability of a token is the logarithm of softmax(z) at it, in float32, where z are the model's own logits for
its position: before penalties, bias, grammar, temperature and filters. The embedding of a prompt is the last hidden
state, after the final norm, of its last token, in float32; the front normalises it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
from numpy.typing import NDArray

MAX_LOGPROBS = 128  # of each kind for one position: best tokens, chosen ids


class LogprobParams(msgspec.Struct, array_like=True, frozen=True):
    """What a request asks for beside the log probability of each output token."""

    start: int  # from this position on those of the prompt's tokens, too; the prompt's length: of none
    top: int = 0  # of the so many best tokens of each position
    ids: tuple[int, ...] = ()  # of these tokens at each position
    text: bool = False  # each with its token's text, for the front to add


@dataclass(frozen=True)
class LogprobRow:
    """What a step finds for one of its rows: of N tokens, each after the logits at one place.

    With `ids`, tokens that follow in the prompt, `at` is the first of N places among the step's tokens. Without, it is
    the place of one among those that are sampled, and the token is what is sampled there. Where it asks for the
    embedding, `at` is the place of the prompt's last token among the step's tokens, and there are no `ids`: [0].
    """

    slot: int
    generation: int
    at: int
    top: int
    chosen: NDArray[np.int32]
    ids: NDArray[np.int32] | None = None  # [N]
    embeds: bool = False

    @property
    def count(self) -> int:
        """N."""
        return 1 if self.ids is None else len(self.ids)


class Logprobs(msgspec.Struct, array_like=True, frozen=True):
    """Of N tokens in a row of one request, which asked for the `top` best and C chosen ids."""

    values: bytes  # float32 [N]
    top_ids: bytes  # int32 [N, top], the best first, the lower id first among equals
    top: bytes  # float32 [N, top]
    chosen: bytes  # float32 [N, C]
    embedding: bytes = b""  # float32 [hidden size]; with N = 0, where it was asked for


def unpack(words: NDArray[np.int32], asked: Sequence[LogprobRow]) -> list[Logprobs]:
    """What a device found for `asked`, from its 32-bit words: the fields of Logprobs, each for all rows."""
    top = max((row.top for row in asked), default=0)
    count = sum(row.count for row in asked)
    wide = sum(row.count * len(row.chosen) for row in asked)
    ends = np.cumsum([count, count * top, count * top, wide])
    values, top_ids, best, chosen, embeddings = np.split(words, ends)
    vectors = iter(np.split(embeddings, max(1, sum(row.embeds for row in asked))))
    top_ids, best = top_ids.reshape(count, top), best.reshape(count, top)
    logprobs, place, entry = [], 0, 0
    for row in asked:
        rows, entries = slice(place, place + row.count), row.count * len(row.chosen)
        logprobs.append(
            Logprobs(
                values[rows].tobytes(),
                top_ids[rows, : row.top].tobytes(),
                best[rows, : row.top].tobytes(),
                chosen[entry : entry + entries].tobytes(),
                next(vectors).tobytes() if row.embeds else b"",
            )
        )
        place, entry = place + row.count, entry + entries
    return logprobs
