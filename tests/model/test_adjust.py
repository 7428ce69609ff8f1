"""Each field's effect on logits, alone and together: numbers worked out by hand, and a plain float64 statement."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from stated_sampling import adjusted_logits
from torch import Tensor

from gapless.kernels.reference import ReferenceOps
from gapless.runtime.core.plan import Sampling, SlotSetup
from gapless.runtime.core.sampling import SamplingParams
from gapless.runtime.model.adjust import Adjustments
from gapless.runtime.model.sampler import allow_only, sample

OPS, CPU = ReferenceOps(), torch.device("cpu")
NO = -math.inf
EVERYTHING = {
    "frequency_penalty": 0.7,
    "presence_penalty": -1.1,
    "repetition_penalty": 1.3,
    "logit_bias": {3: 2.5, 9: -4.0},
    "min_new_tokens": 6,
}


def opened(
    vocabulary: int, *, slot: int = 1, prompt: Any = (), stop_ids: tuple[int, ...] = (), **fields: Any
) -> Adjustments:
    adjustments = Adjustments(vocabulary, CPU)
    reopen(adjustments, slot, prompt, stop_ids, **fields)
    return adjustments


def reopen(
    adjustments: Adjustments, slot: int, prompt: Any = (), stop_ids: tuple[int, ...] = (), **fields: Any
) -> None:
    params = SamplingParams.parse(fields)
    adjustments.open(SlotSetup(slot, np.array(prompt, np.int32), stop_ids, params))


def record(adjustments: Adjustments, output: Any, slot: int = 1, first: int = 0) -> None:
    for i, token in enumerate(output, first):
        adjustments.record(slot, i, torch.tensor([token]))


@pytest.mark.parametrize(
    ("fields", "want"),
    [
        ({"frequency_penalty": 0.5}, [2.0, 0.5, -1.0, -2.5]),
        ({"frequency_penalty": -2}, [2.0, 3.0, 4.0, 0.0]),
        ({"presence_penalty": 0.5}, [2.0, 0.5, -0.5, -2.5]),
        ({"presence_penalty": -1.5}, [2.0, 2.5, 1.5, -0.5]),
        ({"repetition_penalty": 2}, [1.0, 0.5, 0.0, -4.0]),
        ({"repetition_penalty": 0.5}, [4.0, 2.0, 0.0, -1.0]),
        ({"logit_bias": {0: -100, "3": 0.25}}, [-98.0, 1.0, 0.0, -1.75]),
        ({"min_new_tokens": 5}, [NO, 1.0, NO, -2.0]),
        ({"min_new_tokens": 4}, [2.0, 1.0, 0.0, -2.0]),
    ],
)
def test_each_field_alone(fields: dict[str, Any], want: list[float]) -> None:
    """Prompt 0 0, output 1 2 2 3: frequency and presence see the output only; repetition counts a token once."""
    logits = torch.tensor([2.0, 1.0, 0.0, -2.0])
    adjustments = opened(4, prompt=[0, 0], stop_ids=(0, 2), **fields)
    record(adjustments, [1, 2, 2, 3])
    assert adjustments.apply(1, logits, 4).tolist() == want
    assert logits.tolist() == [2.0, 1.0, 0.0, -2.0]


def stated(logits: Tensor, prompt: list[int], output: list[int], stop_ids: tuple[int, ...]) -> Tensor:
    z = adjusted_logits(logits.tolist(), SamplingParams.parse(EVERYTHING), prompt, output, stop_ids)
    return torch.tensor(z, dtype=torch.float64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_all_fields_together_over_a_whole_output(dtype: torch.dtype) -> None:
    """Counts reach back to the first token, not over a window."""
    rng = np.random.default_rng(0)
    prompt, output = rng.integers(0, 40, 30).tolist(), rng.integers(0, 40, 300).tolist()
    adjustments = opened(50, prompt=prompt, stop_ids=(3, 7), **EVERYTHING)
    for i in range(len(output)):
        logits = torch.from_numpy(rng.standard_normal(50) * 3).to(dtype)
        got = adjustments.apply(1, logits, i)
        assert got.dtype == torch.float32
        want = stated(logits, prompt, output[:i], (3, 7))
        torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-4)
        record(adjustments, output[i : i + 1], first=i)


def test_a_new_request_in_a_slot_starts_afresh() -> None:
    logits, slots = torch.randn(20), (1, 2)
    adjustments = opened(20, prompt=[1, 2], stop_ids=(5,), **EVERYTHING)
    reopen(adjustments, 2, [1, 2], (5,), **EVERYTHING)
    for slot in slots:
        record(adjustments, [7, 7, 8], slot)
    reopen(adjustments, 1, [9], repetition_penalty=2.0)
    fresh = opened(20, prompt=[9], repetition_penalty=2.0)
    assert torch.equal(adjustments.apply(1, logits, 0), fresh.apply(1, logits, 0))
    want = stated(logits, [1, 2], [7, 7, 8], (5,))
    torch.testing.assert_close(adjustments.apply(2, logits, 3).double(), want, rtol=1e-5, atol=1e-4)


def test_ids_that_end_a_request_and_that_the_model_does_not_have() -> None:
    """A tokenizer may know more ids than the model's embedding table."""
    adjustments = opened(4, stop_ids=(1, 4, 100_000), min_new_tokens=2)
    assert adjustments.apply(1, torch.zeros(4), 0).tolist() == [0, NO, 0, 0]


def test_min_new_tokens_gives_way_where_only_the_end_is_left() -> None:
    """A grammar that is complete allows nothing but EOS: a token that it forbids would be worse than a short output."""
    adjustments = opened(4, stop_ids=(1, 2), min_new_tokens=9)
    mask = torch.tensor([[0b0110]], dtype=torch.int32)
    masked = allow_only(torch.tensor([[9.0, 1.0, 2.0, 9.0]]), mask)
    assert adjustments.apply(1, masked[0], 0).tolist() == [NO, 1, 2, NO]
    also_allowed = allow_only(torch.tensor([[9.0, 1.0, 2.0, -9.0]]), mask | 0b1000)
    assert adjustments.apply(1, also_allowed[0], 0).tolist() == [NO, NO, NO, -9]


@pytest.mark.parametrize("penalty", [5e-324, 1e-30, 2.0])
def test_no_penalty_makes_a_logit_infinite_or_lets_a_masked_token_in(penalty: float) -> None:
    adjustments = opened(4, prompt=[0, 1, 2, 3], repetition_penalty=penalty, logit_bias={3: 100})
    got = adjustments.apply(1, torch.tensor([50.0, 0.0, -50.0, NO]), 0)
    assert torch.isfinite(got[:3]).all()
    assert got[0] > got[1] > got[2]
    assert got[3] == NO


# ---------------------------------------------------------------- in the sampler


def batch(
    uniform: Any, adjusted: tuple[int, ...], temperature: Any, first_slot: int = 1, **more: Any
) -> Sampling:
    numbers = np.asarray(uniform, np.float64)
    rows = len(numbers)
    temperatures = np.broadcast_to(np.asarray(temperature, np.float32), (rows,))
    values: dict[str, Any] = {
        "slots": np.arange(first_slot, first_slot + rows, dtype=np.int32),
        "output_index": np.zeros(rows, np.int32),
        "top_p": np.ones(rows, np.float32),
        "min_p": np.zeros(rows, np.float32),
        "top_k": np.full(rows, -1, np.int32),
    }
    return Sampling(
        temperature=temperatures,
        uniform=numbers,
        all_greedy=not temperatures.any(),
        adjusted=adjusted,
        **values | more,
    )


@pytest.mark.parametrize(
    ("fields", "odds"),
    [
        ({"frequency_penalty": 2.0}, [1, math.exp(-2), math.exp(-4), 1]),
        ({"presence_penalty": -1.0}, [1, math.e, math.e, 1]),
        ({"repetition_penalty": 2.0}, [1, math.exp(-0.5), math.exp(-0.5), math.exp(-0.5)]),
        ({"logit_bias": {2: 1.5}}, [1, 1, math.exp(1.5), 1]),
        ({"min_new_tokens": 4}, [0, 1, 1, 1]),
    ],
)
def test_draws_follow_the_adjusted_distribution_at_the_temperature(
    fields: dict[str, Any], odds: list[float]
) -> None:
    """All logits are 1; prompt 3, output 1 2 2; temperature 2 takes the root of the odds."""
    grid = (np.arange(1000) + 0.5) / 1000
    want = np.array(odds) ** 0.5
    tokens = []
    for uniform in grid:
        adjustments = opened(4, prompt=[3], stop_ids=(0,), **fields)
        record(adjustments, [1, 2, 2])
        how = batch([uniform], (0,), 2.0, output_index=np.array([3], np.int32))
        tokens.append(sample(torch.ones(1, 4), how, OPS, adjustments).item())
    got = np.bincount(tokens, minlength=4) / len(grid)
    assert np.abs(got - want / want.sum()).max() <= 1.001 / len(grid)


def test_sampled_tokens_are_counted_at_once() -> None:
    """Equal logits and a penalty: a greedy output goes through the whole vocabulary in order, again and again."""
    adjustments = opened(5, frequency_penalty=2.0)
    got = []
    for i in range(15):
        how = batch([0.0], (0,), 0.0, output_index=np.array([i], np.int32))
        got.append(sample(torch.zeros(1, 5), how, OPS, adjustments).item())
    assert got == [0, 1, 2, 3, 4] * 3


def test_filters_look_at_the_adjusted_logits() -> None:
    adjustments = opened(4, logit_bias={3: 10})
    how = batch([0.999], (0,), 1.0, top_k=np.array([2], np.int32))
    assert sample(torch.tensor([[5.0, 4.0, 3.0, 0.0]]), how, OPS, adjustments).item() == 0
    how = batch([0.999], (0,), 1.0, top_p=np.array([0.5], np.float32))
    assert sample(torch.tensor([[5.0, 4.0, 3.0, 0.0]]), how, OPS, adjustments).item() == 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_rows_keep_their_tokens_and_logits_keep_their_values(dtype: torch.dtype) -> None:
    """Every second row adjusts its logits, and every third is greedy; the others give what they give alone."""
    rng = np.random.default_rng(1)
    logits = torch.from_numpy(rng.standard_normal((12, 700))).to(dtype)
    before = logits.clone()
    adjusted = tuple(range(0, 12, 2))
    adjustments = Adjustments(700, CPU)  # knows only the slots of rows that adjust
    for row in adjusted:
        reopen(adjustments, row + 1, range(50), (5,), **EVERYTHING)
    temperature = np.where(np.arange(12) % 3 == 0, 0, 1)
    uniform = rng.random(12)
    tokens = sample(logits, batch(uniform, adjusted, temperature), OPS, adjustments)
    assert torch.equal(logits, before)
    for row in range(1, 12, 2):
        alone = batch(uniform[row : row + 1], (), temperature[row : row + 1], row + 1)
        none = Adjustments(700, CPU)
        assert sample(logits[row : row + 1], alone, OPS, none).item() == tokens[row]
    for row in adjusted:
        none = opened(700, slot=row + 1, prompt=range(50), stop_ids=(5,), **EVERYTHING)
        alone = batch(uniform[row : row + 1], (0,), temperature[row : row + 1], row + 1)
        assert sample(logits[row : row + 1], alone, OPS, none).item() == tokens[row]
