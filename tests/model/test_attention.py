from __future__ import annotations

import math

import pytest
import torch

from gapless.kernels.ops import Ops, StepBatch


@pytest.mark.parametrize("soft_cap", [None, 0.7])
@pytest.mark.parametrize("window", [None, 3])
def test_attention_is_its_definition(ops: Ops, window: int | None, soft_cap: float | None) -> None:
    """One request of seven positions, the last five of them new, in pages 2 and 0 of four; two heads share KV."""
    generator = torch.Generator().manual_seed(5)
    q, k, v = (torch.randn(shape, generator=generator) for shape in ((5, 2, 8), (7, 8), (7, 8)))
    cache = (torch.zeros(3, 4, 1, 8), torch.zeros(3, 4, 1, 8))
    for pages, rows in zip(cache, (k, v), strict=True):
        pages[2, :, 0], pages[0, :3, 0] = rows[:4], rows[4:]
    batch = StepBatch(
        q_start=torch.tensor([0, 5], dtype=torch.int32),
        kv_len=torch.tensor([7], dtype=torch.int32),
        slots=torch.tensor([1], dtype=torch.int32),
        page_table=torch.tensor([[1, 1], [2, 0]], dtype=torch.int32),
        positions=torch.arange(2, 7, dtype=torch.int32),
        out_loc=torch.tensor([10, 11, 0, 1, 2], dtype=torch.int32),
        page_size=4,
        max_kv_len=7,
        max_q_len=5,
    )
    got = ops.attention(q, cache, batch, 0.4, window, soft_cap).view(5, 2, 8)
    for token, position in enumerate(range(2, 7)):
        seen = range(0 if window is None else max(0, position - window + 1), position + 1)
        for head in range(2):
            scores = [0.4 * float(q[token, head] @ k[p]) for p in seen]
            if soft_cap is not None:
                scores = [soft_cap * math.tanh(score / soft_cap) for score in scores]
            weights = [math.exp(score) for score in scores]
            want = sum(w * v[p] for w, p in zip(weights, seen, strict=True)) / sum(weights)
            torch.testing.assert_close(got[token, head], want, atol=1e-5, rtol=0)
