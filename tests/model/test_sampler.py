"""Sampling: exact against a plain float64 statement of the filters, draw by draw."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from gapless.kernels.reference import ReferenceOps
from gapless.runtime.core.plan import Sampling
from gapless.runtime.model import sampler
from gapless.runtime.model.adjust import Adjustments

OPS = ReferenceOps()
GRID = (np.arange(1000) + 0.5) / 1000


def sample(logits: Tensor, how: Sampling, ops: ReferenceOps) -> Tensor:
    """No row of these tests adjusts its logits."""
    return sampler.sample(logits, how, ops, Adjustments(logits.shape[-1], torch.device("cpu")))


def batch(
    uniform: Any, temperature: Any = 1.0, top_k: Any = -1, top_p: Any = 1.0, min_p: Any = 0.0
) -> Sampling:
    """One row for each uniform number; the other fields are one value or one a row."""
    numbers = np.asarray(uniform, np.float64)
    full = lambda value, dtype: np.broadcast_to(np.asarray(value, dtype), numbers.shape)  # noqa: E731
    return Sampling(
        slots=np.arange(1, len(numbers) + 1, dtype=np.int32),
        output_index=np.zeros(len(numbers), np.int32),
        all_greedy=not np.any(temperature),
        temperature=full(temperature, np.float32),
        top_k=full(top_k, np.int32),
        top_p=full(top_p, np.float32),
        min_p=full(min_p, np.float32),
        uniform=numbers,
    )


def probabilities(
    logits: Tensor, temperature: float, top_k: int, top_p: float, min_p: float
) -> NDArray[np.float64]:
    """The distribution that the filters leave, by sorting everything in float64."""
    scores = logits.double().numpy() / temperature
    all_of_it = np.exp(scores - scores.max())
    all_of_it /= all_of_it.sum()
    order = np.argsort(-all_of_it, kind="stable")
    p = all_of_it[order]
    keep = (np.cumsum(p) - p <= np.float32(top_p)) & (p >= np.float32(min_p) * p[0])
    if top_k > 0:
        keep[top_k:] = False
    result = np.zeros_like(p)
    result[order] = np.where(keep, p, 0)
    return result / result.sum()


def histogram(logits: Tensor, **how: Any) -> NDArray[np.float64]:
    tokens = sample(logits.expand(len(GRID), -1), batch(GRID, **how), OPS)
    return np.bincount(tokens.numpy(), minlength=logits.shape[-1]) / len(GRID)


@pytest.mark.parametrize("vocabulary", [1, 5, 511, 600])
@pytest.mark.parametrize(
    "how",
    [
        {},
        {"temperature": 0.3},
        {"temperature": 100.0},
        {"top_k": 3},
        {"top_p": 0.7},
        {"min_p": 0.2},
        {"top_k": 20, "top_p": 0.6, "min_p": 0.05, "temperature": 1.7},
        {"top_k": 10_000, "top_p": 0.999},
    ],
)
def test_a_grid_of_uniforms_reproduces_the_distribution(vocabulary: int, how: dict[str, Any]) -> None:
    """An interval of width p holds p of an even grid's points, give or take one."""
    logits = torch.randn(vocabulary, generator=torch.Generator().manual_seed(vocabulary)) * 2
    want = probabilities(logits, **{"temperature": 1.0, "top_k": -1, "top_p": 1.0, "min_p": 0.0} | how)
    got = histogram(logits, **how)
    assert np.abs(got - want).max() <= 1.001 / len(GRID)
    assert not got[want == 0].any()


@pytest.mark.parametrize("spread", [0.0, 0.05, 1.0, 8.0])
@pytest.mark.parametrize("top_k", [-1, 1, 50, 5000])
def test_large_vocabulary_equals_sorting_all_of_it(spread: float, top_k: int) -> None:
    """From a flat distribution, whose nucleus is most of the vocabulary, to a peaked one."""
    vocabulary = 70_001
    logits = torch.randn(vocabulary, generator=torch.Generator().manual_seed(1)) * spread
    uniforms = np.array([0.0, 0.123, 0.5, 0.987, 1 - 2.0**-53])
    p = probabilities(logits, 1.0, top_k, 0.9, 0.0)
    order = np.argsort(-logits.numpy(), kind="stable")
    below = np.concatenate(([0.0], np.cumsum(p[order])))
    tokens = sample(logits.expand(len(uniforms), -1), batch(uniforms, top_p=0.9, top_k=top_k), OPS)
    for token, uniform in zip(tokens.tolist(), uniforms, strict=True):
        rank = int(np.flatnonzero(order == token)[0])
        assert p[token] > 0
        assert below[rank] - 1e-5 <= uniform <= below[rank + 1] + 1e-5


def test_greedy_takes_the_first_of_equals_and_ignores_the_rest() -> None:
    """Temperature 0 with any filter and any random number is argmax."""
    logits = torch.tensor([[0.0, 3.0, 3.0, 1.0]] * 3).bfloat16()
    got = sample(logits, batch([0.9, 0.1, 0.5], temperature=0.0, top_p=0.1, min_p=0.9, top_k=2), OPS)
    assert got.tolist() == [1, 1, 1]


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    """The same row alone, and among 15 others of every kind, gives the same token for every random number."""
    rng = np.random.default_rng(0)
    logits = torch.from_numpy(rng.standard_normal((16, 3000))).bfloat16()
    together = batch(
        rng.random(16),
        temperature=np.where(np.arange(16) % 4 == 0, 0, 0.9),
        top_k=np.where(np.arange(16) % 3 == 0, 40, -1),
        top_p=np.where(np.arange(16) % 5 == 0, 0.8, 1),
        min_p=np.where(np.arange(16) % 7 == 0, 0.02, 0),
    )
    tokens = sample(logits, together, OPS)

    def rows(chosen: slice) -> Sampling:
        names = ("temperature", "top_k", "top_p", "min_p")
        return batch(together.uniform[chosen], **{name: getattr(together, name)[chosen] for name in names})

    for i in range(16):
        row = slice(i, i + 1)
        assert sample(logits[row], rows(row), OPS).item() == tokens[i]
    backwards = rows(slice(None, None, -1))
    assert sample(logits.flip(0), backwards, OPS).flip(0).tolist() == tokens.tolist()


@pytest.mark.parametrize(
    "how",
    [
        {"temperature": 1e-6},
        {"top_k": 1},
        {"top_p": 1e-30},
        {"min_p": 1.0},
        {"temperature": 50.0, "top_k": 1},
    ],
)
def test_extremes_that_leave_one_token(how: dict[str, Any]) -> None:
    logits = torch.randn(2000, generator=torch.Generator().manual_seed(2))
    assert set(sample(logits.expand(9, -1), batch(np.linspace(0, 0.999, 9), **how), OPS).tolist()) == {
        int(logits.argmax())
    }


@pytest.mark.parametrize("how", [{}, {"temperature": 3e38}, {"top_k": 7}, {"top_p": 0.9}, {"min_p": 0.5}])
@pytest.mark.parametrize("survivor", [0, 700, 1999])
def test_masked_tokens_are_never_drawn(survivor: int, how: dict[str, Any]) -> None:
    """All logits but one are -inf, as a grammar leaves them."""
    logits = torch.full((2000,), float("-inf"))
    logits[survivor] = -3.0
    uniforms = [0.0, 0.5, 1 - 2.0**-53]
    assert sample(logits.expand(3, -1), batch(uniforms, **how), OPS).tolist() == [survivor] * 3


def test_top_k_cuts_equals_by_index() -> None:
    """Of five equal tokens, top_k 2 keeps the two with the lowest ids."""
    assert histogram(torch.zeros(5), top_k=2).tolist() == [0.5, 0.5, 0, 0, 0]


def test_top_p_and_top_k_both_look_at_the_whole_distribution() -> None:
    """top_p does not see top_k's cut: the best token holds 0.4 of all, 0.57 of the best two, so 0.5 leaves two."""
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()
    assert (histogram(logits, top_k=2, top_p=0.5) > 0).tolist() == [True, True, False, False]
