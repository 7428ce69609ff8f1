"""The batched sampler picks what the row-by-row sampler picks, and never looks at what a tensor holds."""

from __future__ import annotations

import dataclasses
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor

from gapless.kernels.reference import ReferenceOps
from gapless.runtime.core.plan import Sampling, SlotSetup
from gapless.runtime.core.sampling import SamplingParams
from gapless.runtime.model import sampler_batched
from gapless.runtime.model.adjust import Adjustments
from gapless.runtime.model.sampler import allow_only, sample
from gapless.runtime.model.sampler_batched import SamplingTensors, sample_batched

OPS = ReferenceOps()
CPU = torch.device("cpu")
ROWS = 96


def random_batch(seed: int, rows: int = ROWS) -> Sampling:
    """Rows of every kind beside each other."""
    rng = np.random.default_rng(seed)

    def some(values: Any, neutral: float, dtype: type) -> Any:
        return np.where(rng.random(rows) < 0.5, values, neutral).astype(dtype)

    return Sampling(
        slots=np.arange(1, rows + 1, dtype=np.int32),
        output_index=np.zeros(rows, np.int32),
        temperature=np.where(rng.random(rows) < 0.2, 0, rng.choice([0.3, 1.0, 1.7, 1e30], rows)).astype(
            np.float32
        ),
        top_k=some(rng.integers(1, 60, rows), -1, np.int32),
        top_p=some(rng.random(rows), 1.0, np.float32),
        min_p=some(rng.random(rows) / 4, 0.0, np.float32),
        uniform=rng.random(rows),
        all_greedy=False,
    )


def fields_of(batch: Sampling, device: torch.device = CPU) -> SamplingTensors:
    return SamplingTensors(
        *(
            torch.from_numpy(np.array(getattr(batch, field.name))).to(device)
            for field in dataclasses.fields(SamplingTensors)
        )
    )


def adjustments() -> Adjustments:
    return Adjustments(10, CPU)


def both(logits: Tensor, batch: Sampling) -> tuple[Tensor, Tensor]:
    want = sample(logits, batch, OPS, adjustments())
    return want, sample_batched(logits, batch, fields_of(batch), OPS, adjustments())


def moved(batch: Sampling, by: float) -> Sampling:
    return msgspec.structs.replace(batch, uniform=np.clip(batch.uniform + by, 0, 1 - 2.0**-53))


@pytest.mark.parametrize("block", [None, 3000])
@pytest.mark.parametrize("vocabulary", [1, 33, 1000, 5003])
def test_it_picks_the_row_by_row_samplers_tokens(
    vocabulary: int, block: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In bfloat16, where ties abound. Another token is right only where the draw lies within 1e-9 of an edge."""
    if block:
        monkeypatch.setattr(sampler_batched, "_BLOCK_ELEMENTS", block)
    for seed in range(8):
        generator = torch.Generator().manual_seed(seed)
        logits = (torch.randn(ROWS, vocabulary, generator=generator) * 3).bfloat16()
        batch = random_batch(seed)
        want, got = both(logits, batch)
        assert got.dtype == torch.int64
        for row in (want != got).nonzero()[:, 0].tolist():
            edges = {int(both(logits, moved(batch, by))[0][row]) for by in (-1e-9, 1e-9)}
            assert int(got[row]) in edges


@pytest.mark.parametrize("how", [{}, {"top_k": 7}, {"top_p": 0.9}, {"min_p": 0.5}])
@pytest.mark.parametrize("survivor", [0, 700, 1999])
def test_masked_tokens_are_never_drawn(survivor: int, how: dict[str, Any]) -> None:
    """All ids but one are forbidden by the mask's bits, as a grammar leaves them."""
    mask = np.zeros((1, 63), np.int32)
    mask[0, survivor // 32] = np.int64(1 << (survivor % 32)).astype(np.int32)
    logits = allow_only(
        torch.randn(3, 2000, generator=torch.Generator().manual_seed(0)), torch.from_numpy(mask)
    )
    batch = msgspec.structs.replace(
        random_batch(0, 3),
        uniform=np.array([0.0, 0.5, 1 - 2.0**-53]),
        temperature=np.ones(3, np.float32),
        **{
            "top_k": np.full(3, -1, np.int32),
            "top_p": np.ones(3, np.float32),
            "min_p": np.zeros(3, np.float32),
        }
        | {
            name: np.full(3, value, np.int32 if name == "top_k" else np.float32)
            for name, value in how.items()
        },
    )
    assert both(logits, batch)[1].tolist() == [survivor] * 3


def test_a_sum_that_falls_by_a_rounding_draws_no_forbidden_token() -> None:
    """A parallel scan may give a later index a smaller sum: the draw goes to the next kept index, or to none."""
    kept = torch.tensor([[True, False, False, True]])
    mass = torch.tensor([[1.0, 1.0 + 2e-16, 1.0, 3.0]], dtype=torch.float64)
    half = torch.tensor([1.0 / 3], dtype=torch.float64)
    assert sampler_batched._invert(mass, mass[:, -1:], kept, half).tolist() == [3]
    beyond = torch.tensor([[4.0]], dtype=torch.float64)
    assert sampler_batched._invert(mass, beyond, kept, torch.tensor([0.9]).double()).tolist() == [-1]


def test_logits_that_are_no_numbers_stay_inside_the_vocabulary() -> None:
    logits = torch.full((2, 50), float("nan"))
    batch = msgspec.structs.replace(random_batch(1, 2), temperature=np.ones(2, np.float32))
    tokens = sample_batched(logits, batch, fields_of(batch), OPS, adjustments())
    assert ((tokens >= 0) & (tokens < 50)).all()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_adjusted_rows_are_adjusted_and_counted(temperature: float) -> None:
    """Four draws of two rows; the first forbids repetition all but entirely, the second is left alone."""
    logits = torch.zeros(2, 6)
    logits[:, 2] = 4.0
    states = []
    for _ in range(2):
        states.append(Adjustments(6, CPU))
        params = SamplingParams(frequency_penalty=2.0, logit_bias={3: 3.0}, max_new_tokens=9)
        states[-1].open(SlotSetup(1, np.array([1], np.int32), (0,), params))
    for index in range(4):
        batch = msgspec.structs.replace(
            random_batch(index, 2),
            temperature=np.full(2, temperature, np.float32),
            output_index=np.full(2, index, np.int32),
            all_greedy=not temperature,
            adjusted=(0,),
        )
        want = sample(logits, batch, OPS, states[0])
        got = sample_batched(logits, batch, fields_of(batch), OPS, states[1])
        assert want.tolist() == got.tolist()
    assert logits[0].tolist() == [0, 0, 4, 0, 0, 0]
    assert states[0]._slots[1].tokens[:4].tolist() == states[1]._slots[1].tokens[:4].tolist()
