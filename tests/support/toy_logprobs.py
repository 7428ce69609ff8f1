"""The closed form of what the toy model says of log probabilities."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from differential import Seen

from gapless.runtime.core.logprobs import LogprobParams, Logprobs
from gapless.runtime.core.messages import Finish
from gapless.runtime.model.toy import ToyKnobs, toy_entries, toy_logprobs

Entry = tuple[float, list[tuple[float, int]], list[float]]  # the token's, the best ones', the chosen ones'


def expected_logprobs(knobs: ToyKnobs, ids: Sequence[int], first: int, params: LogprobParams) -> list[Entry]:
    """Those of ids[first:], each after all before it; `first` is 1 at least."""
    histories = toy_entries(np.array(ids, np.int64), np.arange(len(ids))).cumsum(dtype=np.uint64)
    entries = []
    for place in range(first, len(ids)):
        values = toy_logprobs(knobs, histories[place - 1 : place])[0].tolist()
        best = sorted(range(len(values)), key=lambda token: (-values[token], token))[: params.top]
        top = [(values[token], token) for token in best]
        entries.append((values[ids[place]], top, [values[token] for token in params.ids]))
    return entries


def read_logprobs(parts: Iterable[Logprobs], params: LogprobParams) -> list[Entry]:
    def floats(data: bytes, width: int) -> list[list[float]]:
        rows = -1 if width else count
        return np.frombuffer(data, np.float32).reshape(rows, width).tolist()  # type: ignore[no-any-return]

    entries: list[Entry] = []
    for part in parts:
        values = np.frombuffer(part.values, np.float32).tolist()
        count = len(values)
        ids: Any = np.frombuffer(part.top_ids, np.int32).reshape(count, params.top).tolist()
        best = [list(zip(*row, strict=True)) for row in zip(floats(part.top, params.top), ids, strict=True)]
        entries += zip(values, best, floats(part.chosen, len(params.ids)), strict=True)
    return entries


def check_logprobs(knobs: ToyKnobs, prompt: Sequence[int], params: LogprobParams | None, seen: Seen) -> None:
    """One for each output token, and for each of the prompt's from the start on, but where it ended before."""
    if params is None:
        assert not seen.logprobs
        return
    of_prompt = read_logprobs([part for is_prompt, part in seen.logprobs if is_prompt], params)
    of_output = read_logprobs([part for is_prompt, part in seen.logprobs if not is_prompt], params)
    first = max(params.start, 1)
    want = expected_logprobs(knobs, [*prompt, *seen.ids], min(first, len(prompt)), params)
    want_prompt = want[: len(prompt) - min(first, len(prompt))]
    assert of_output == want[len(want_prompt) :]
    whole = seen.ids or seen.finish == Finish.LENGTH
    assert of_prompt == (want_prompt if whole else want_prompt[: len(of_prompt)])
