"""Which log probabilities and embeddings a step is asked for."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from gapless.runtime.core.logprobs import LogprobRow
from gapless.runtime.core.plan import I32
from gapless.runtime.scheduler.batch import Batch
from gapless.runtime.scheduler.composition import NO_INTS
from gapless.runtime.scheduler.request import Request


def of_samples(batch: Batch, slots: Iterable[int]) -> tuple[LogprobRow, ...]:
    """Those of the tokens that are sampled for `slots`."""
    requests = [(at, batch.scored.get(slot)) for at, slot in enumerate(slots)]
    return tuple(_row(request, at) for at, request in requests if request is not None)


def of_chunks(
    batch: Batch, chunks: list[tuple[int, int]], begins: list[int], first: int
) -> tuple[LogprobRow, ...]:
    """Those of the prompt tokens that follow a token of one of the chunks, also where they are part of the next chunk;
    and the embeddings of those prompts whose last token is in one.

    `chunks` have slot and number of tokens, `begins` the position of each one's first token, and `first` is the place
    of the first of all among the step's tokens. A request that computes its prompt again is not asked twice.
    """
    asked = []
    for (slot, count), begin in zip(chunks, begins, strict=True):
        request = batch.scored.get(slot)
        if request is not None:
            following = request.prompt[request.unscored : begin + count + 1]
            if following.size:
                assert begin < request.unscored, "logits that a log probability needs are not computed"
                asked.append(_row(request, first + request.unscored - 1 - begin, following))
                request.unscored += len(following)
            if request.unembedded and begin + count == len(request.prompt):
                last = first + count - 1
                asked.append(LogprobRow(slot, request.generation, last, 0, NO_INTS, NO_INTS, embeds=True))
                request.unembedded = False
        first += count
    return tuple(asked)


def _row(request: Request, at: int, ids: I32 | None = None) -> LogprobRow:
    wanted = request.submit.logprobs
    assert wanted is not None
    chosen = np.array(wanted.ids, np.int32)
    return LogprobRow(request.slot, request.generation, at, wanted.top, chosen, ids)
