"""Log probabilities of blocks of logits, against log_softmax of the whole."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from gapless.runtime.core.logprobs import LogprobRow, unpack
from gapless.runtime.model import logprobs

VOCABULARY = 200


def row(at: int, top: int, chosen: list[int], ids: list[int] | None = None) -> LogprobRow:
    following = None if ids is None else np.array(ids, np.int32)
    return LogprobRow(1, 1, at, top, np.array(chosen, np.int32), following)


def check(logits: Tensor, ids: list[int], asked: list[LogprobRow], sources: list[logprobs.Source]) -> None:
    """`logits` and `ids` are those of all places in turn."""
    want = logits.double().log_softmax(1)
    found, place = unpack(logprobs.score(sources, asked, VOCABULARY).numpy(), asked), 0
    for entry, result in zip(asked, found, strict=True):
        rows = want[place : place + entry.count]
        tokens = torch.tensor(ids[place : place + entry.count])
        values = torch.frombuffer(bytearray(result.values), dtype=torch.float32)
        torch.testing.assert_close(
            values.double(), rows.gather(1, tokens[:, None])[:, 0], atol=1e-5, rtol=1e-5
        )
        top_ids = np.frombuffer(result.top_ids, np.int32).reshape(entry.count, entry.top)
        top = np.frombuffer(result.top, np.float32).reshape(entry.count, entry.top)
        chosen = np.frombuffer(result.chosen, np.float32).reshape(entry.count, len(entry.chosen))
        for i in range(entry.count):
            values_of = logits[place + i].tolist()
            best = sorted(range(VOCABULARY), key=lambda token: (-values_of[token], token))[: entry.top]
            assert top_ids[i].tolist() == best
            np.testing.assert_allclose(top[i], rows[i, best].numpy(), atol=1e-5)
            np.testing.assert_allclose(chosen[i], rows[i, entry.chosen].numpy(), atol=1e-5)
        place += entry.count


@pytest.mark.parametrize("block_rows", [1, 3, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_row_gets_what_it_asks_for(monkeypatch, block_rows, dtype) -> None:
    """Samples and prompts, with different numbers of best tokens and chosen ids, in blocks that cut across rows."""
    monkeypatch.setattr(logprobs, "_BLOCK_ELEMENTS", block_rows * VOCABULARY)
    samples = torch.randn(3, VOCABULARY, generator=torch.Generator().manual_seed(1)).to(dtype)
    prompts = torch.randn(12, VOCABULARY, generator=torch.Generator().manual_seed(2)).to(dtype)
    ids = [5, 6, 7, *range(12)]
    asked = [row(0, 2, [9]), row(1, 0, []), row(2, 0, [199, 0])]
    asked += [row(0, 5, [], list(range(7))), row(7, 0, [3, 3, 8], list(range(7, 12)))]
    sources = [
        (lambda places: samples[places], torch.tensor(ids[:3])),
        (lambda places: prompts[places], torch.tensor(ids[3:])),
    ]
    check(torch.cat([samples, prompts]), ids, asked, sources)


@pytest.mark.parametrize("top", [1, 3, 20])
def test_the_lower_id_comes_first_among_equals(top: int) -> None:
    """As with the greedy choice, so that its token is the first of the best ones."""
    order = torch.randperm(2 * VOCABULARY, generator=torch.Generator().manual_seed(4)).view(2, VOCABULARY)
    logits = -(order // 20).float()  # about ten of each
    check(
        logits,
        [1, 2],
        [row(0, top, []), row(1, top, [])],
        [(lambda places: logits[places], torch.tensor([1, 2]))],
    )


def test_as_many_best_tokens_as_there_are(monkeypatch) -> None:
    logits = torch.randn(2, VOCABULARY, generator=torch.Generator().manual_seed(3))
    asked = [row(0, VOCABULARY, [], [4, 5])]
    check(logits, [4, 5], asked, [(lambda places: logits[places], torch.tensor([4, 5]))])
