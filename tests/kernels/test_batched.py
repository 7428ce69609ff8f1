"""The operations for a GPU compute what the reference computes; here they run on the CPU."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest
import torch

from gapless.kernels import batched
from gapless.kernels.batched import BatchedOps
from gapless.kernels.ops import StepBatch, choose_ops
from gapless.kernels.reference import ReferenceOps
from gapless.runtime.core.errors import ConfigError

HEADS, KV_HEADS, HEAD_DIM = 4, 2, 8


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Work as small as this is slower on more."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def random_step(
    counts: list[int], lengths: list[int], page_size: int
) -> tuple[StepBatch, torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
    """Rows with so many new tokens, at the end of so many positions, on shuffled pages; pages of nobody hold NaN."""
    generator = torch.Generator().manual_seed(len(counts))
    rows, columns = len(counts), -(-max(lengths) // page_size)
    nobodys = rows * columns
    table = torch.randperm(nobodys, generator=generator).int().view(rows, columns)
    for row, length in enumerate(lengths):
        table[row, -(-length // page_size) :] = nobodys
    shape = (nobodys + 1, page_size, KV_HEADS, HEAD_DIM)
    cache = (torch.randn(shape, generator=generator), torch.randn(shape, generator=generator))
    for pool in cache:
        pool[nobodys] = float("nan")
    spans = [range(length - count, length) for count, length in zip(counts, lengths, strict=True)]
    batch = StepBatch(
        q_start=torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()], dtype=torch.int32),
        kv_len=torch.tensor(lengths, dtype=torch.int32),
        slots=torch.arange(rows, dtype=torch.int32).flip(0),
        page_table=table.flip(0),
        positions=torch.tensor([p for span in spans for p in span], dtype=torch.int32),
        out_loc=torch.zeros(sum(counts), dtype=torch.int32),
        page_size=page_size,
        max_kv_len=max(lengths),
        max_q_len=max(counts),
    )
    return batch, torch.randn(sum(counts), HEADS, HEAD_DIM, generator=generator), cache


@pytest.mark.parametrize("soft_cap", [None, 0.7])
@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("block", [None, 1])
@pytest.mark.parametrize(
    ("counts", "lengths"), [([1, 1, 1], [9, 30, 1]), ([1, 1, 7, 12], [17, 3, 7, 33]), ([20], [20])]
)
@pytest.mark.parametrize("page_size", [1, 4])
def test_attention_is_the_reference_s(
    page_size: int,
    counts: list[int],
    lengths: list[int],
    block: int | None,
    window: int | None,
    soft_cap: float | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Decode rows, chunks and both; in one block and in a block for each token."""
    if block:
        monkeypatch.setattr(batched, "_BLOCK_ELEMENTS", block)
    batch, q, cache = random_step(counts, lengths, page_size)
    want = ReferenceOps().attention(q, cache, batch, 0.3, window, soft_cap)
    got = BatchedOps().attention(q, cache, batch, 0.3, window, soft_cap)
    assert not want.isnan().any()
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


def test_another_request_s_infinite_kv_does_not_show() -> None:
    """What a row must not see is not read at all: zero times infinity would be no number."""
    batch, q, cache = random_step([1, 1], [3, 30], 4)
    alone = dataclasses.replace(
        batch, q_start=batch.q_start[:2], slots=batch.slots[:1], kv_len=batch.kv_len[:1]
    )
    want = ReferenceOps().attention(q[:1], cache, alone, 0.3, None, None)
    for pool in cache:
        mine = batch.page_table[batch.slots[0], :1]
        others = torch.ones(len(pool), dtype=torch.bool)
        others[mine] = False
        pool[others] = float("inf")
    got = BatchedOps().attention(q, cache, batch, 0.3, None, None)
    torch.testing.assert_close(got[:1], want, atol=1e-5, rtol=1e-5)


def test_a_gpu_gets_them_and_no_c_kernels() -> None:
    gpu = torch.device("cuda")
    assert isinstance(choose_ops("auto", gpu), BatchedOps) and isinstance(
        choose_ops("torch", gpu), BatchedOps
    )
    with pytest.raises(ConfigError, match="native"):
        choose_ops("native", gpu)
