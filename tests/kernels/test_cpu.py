"""The C kernels against the plain torch operations, for this CPU and, on x86, for older ones.

Tolerances: in float32, sums of the same numbers in another order, 2e-5 of the largest result; in bfloat16, results
that round to neighbours, 2**-7 of each number, more where an intermediate is rounded too.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gapless.kernels.compile import CompileError, compile_kernels
from gapless.kernels.cpu import NativeOps, load_kernels
from gapless.kernels.cpu_linear import NativeLinear
from gapless.kernels.ops import Activation, StepBatch
from gapless.kernels.reference import ReferenceOps

MARCHES: list[Any] = ["native"]
if torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512"):
    MARCHES += ["x86-64-v3", pytest.param("x86-64", marks=pytest.mark.slow)]
DTYPES = [torch.float32, torch.bfloat16]
REFERENCE = ReferenceOps()


@pytest.fixture(scope="module", params=MARCHES)
def ops(request: pytest.FixtureRequest) -> NativeOps:
    try:
        return NativeOps(load_kernels(compile_kernels(request.param)))
    except CompileError as error:
        pytest.skip(str(error))


def assert_close(got: Tensor, want: Tensor, roundings: int = 1) -> None:
    assert got.dtype == want.dtype
    scale = float(want.abs().max()) if want.numel() else 1.0
    if (
        got.dtype == torch.bfloat16
    ):  # sums are of float32, in any order: where they cancel, some of that is left
        atol = max(1e-5, 1e-6 * scale) + (roundings - 1) * 2**-7
        torch.testing.assert_close(got, want, rtol=roundings * 2**-7, atol=atol)
    else:
        torch.testing.assert_close(got, want, rtol=0, atol=2e-5 * max(scale, 1e-3))


def random(generator: torch.Generator, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=generator).to(dtype)


def step(rows: list[tuple[int, int]], page_size: int, generator: torch.Generator) -> tuple[StepBatch, int]:
    """A batch of (new tokens, KV length) rows over scattered pages, and the pool's size; other pages stay unused."""
    counts = [-(-length // page_size) for _, length in rows]
    pages = sum(counts) + 3
    shuffled = torch.randperm(pages, generator=generator).to(torch.int32)
    table = torch.full((len(rows) + 2, max(counts) + 1), int(shuffled[-1]), dtype=torch.int32)
    slots = torch.randperm(len(rows) + 2, generator=generator)[: len(rows)].to(torch.int32)
    given_out = 0
    for slot, count in zip(slots.tolist(), counts, strict=True):
        table[slot, :count] = shuffled[given_out : given_out + count]
        given_out += count
    positions = torch.cat([torch.arange(length - new, length) for new, length in rows])
    row_slots = torch.repeat_interleave(slots, torch.tensor([new for new, _ in rows]))
    places = table[row_slots, positions // page_size] * page_size + positions % page_size
    batch = StepBatch(
        q_start=torch.tensor([0, *(new for new, _ in rows)]).cumsum(0).to(torch.int32),
        kv_len=torch.tensor([length for _, length in rows], dtype=torch.int32),
        slots=slots,
        page_table=table,
        positions=positions.to(torch.int32),
        out_loc=places.to(torch.int32),
        page_size=page_size,
        max_kv_len=max(length for _, length in rows),
        max_q_len=max(new for new, _ in rows),
    )
    return batch, pages


def poisoned_cache(
    batch: StepBatch,
    pages: int,
    shape: tuple[int, int],
    oldest: list[int],
    generator: torch.Generator,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """NaN everywhere but at the positions that a row may read."""
    cache = torch.full((2, pages, batch.page_size, *shape), float("nan"), dtype=dtype)
    for slot, begin, end in zip(batch.slots.tolist(), oldest, batch.kv_len.tolist(), strict=True):
        positions = torch.arange(begin, end)
        page = batch.page_table[slot, positions // batch.page_size]
        cache[:, page, positions % batch.page_size] = random(generator, 2, end - begin, *shape, dtype=dtype)
    return cache[0], cache[1]


@st.composite
def attention_cases(draw: Any) -> dict[str, Any]:
    lengths = st.integers(1, 90) | st.integers(480, 620) | st.integers(1000, 1700)
    rows = draw(st.lists(st.tuples(st.just(1) | st.integers(1, 70), lengths), min_size=1, max_size=5))
    kv_heads = draw(st.sampled_from([1, 2]))
    return {
        "rows": [(min(new, length), length) for new, length in rows],
        "page_size": draw(st.sampled_from([1, 3, 4, 16, 64])),
        "heads": (kv_heads * draw(st.sampled_from([1, 3, 4, 8])), kv_heads),
        "dim": draw(st.sampled_from([16, 20, 64, 80, 96, 128, 256])),
        "window": draw(st.none() | st.sampled_from([1, 7, 64, 513, 700])),
        "soft_cap": draw(st.sampled_from([None, 5.0, 50.0])),
        "dtype": draw(st.sampled_from(DTYPES)),
        "seed": draw(st.integers(0, 99)),
    }


@settings(max_examples=30, deadline=None)
@given(case=attention_cases())
def test_attention(ops: NativeOps, case: dict[str, Any]) -> None:
    """Prefill chunks and decode rows in one step; whatever lies outside a row's window and length is NaN."""
    generator = torch.Generator().manual_seed(case["seed"])
    (heads, kv_heads), dim, dtype = case["heads"], case["dim"], case["dtype"]
    batch, pages = step(case["rows"], case["page_size"], generator)
    window = case["window"]
    oldest = [0 if window is None else max(0, length - new - window + 1) for new, length in case["rows"]]
    cache = poisoned_cache(batch, pages, (kv_heads, dim), oldest, generator, dtype)
    q = random(generator, int(batch.q_start[-1]), heads, dim, dtype=dtype)
    arguments = (q, cache, batch, dim**-0.5, window, case["soft_cap"])
    assert_close(ops.attention(*arguments), REFERENCE.attention(*arguments))


def test_attention_of_windows_in_different_splits(ops: NativeOps) -> None:
    """Two decode rows whose windows span several splits of the keys, the second's further on than the first's."""
    generator = torch.Generator().manual_seed(8)
    batch, pages = step([(1, 600), (1, 2000)], 16, generator)
    cache = poisoned_cache(batch, pages, (1, 64), [0, 1300], generator, torch.float32)
    arguments = (random(generator, 2, 4, 64), cache, batch, 0.125, 700, None)
    assert_close(ops.attention(*arguments), REFERENCE.attention(*arguments))


@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_of_a_row_does_not_depend_on_its_step(ops: NativeOps, dtype: torch.dtype) -> None:
    """Bit for bit: the last token decoded alone, among others, and as the end of a prefill chunk."""
    generator = torch.Generator().manual_seed(3)
    rows = [(40, 1300), (1, 77), (1, 1100), (130, 130)]
    batch, pages = step(rows, 16, generator)
    cache = poisoned_cache(batch, pages, (2, 64), [0] * len(rows), generator, dtype)
    q = random(generator, int(batch.q_start[-1]), 8, 64, dtype=dtype)
    together = ops.attention(q, cache, batch, 0.125, None, None)
    for row, end in enumerate(batch.q_start[1:].tolist()):
        alone = StepBatch(
            q_start=torch.tensor([0, 1], dtype=torch.int32),
            kv_len=batch.kv_len[row : row + 1],
            slots=batch.slots[row : row + 1],
            page_table=batch.page_table,
            positions=batch.positions[end - 1 : end],
            out_loc=batch.out_loc[end - 1 : end],
            page_size=16,
            max_kv_len=rows[row][1],
            max_q_len=1,
        )
        got = ops.attention(q[end - 1 : end], cache, alone, 0.125, None, None)
        assert torch.equal(got[0], together[end - 1])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [1, 3, 64])
@pytest.mark.parametrize("width", [1, 20, 640])
def test_norms(ops: NativeOps, dtype: torch.dtype, tokens: int, width: int) -> None:
    generator = torch.Generator().manual_seed(0)
    x, residual = (random(generator, tokens, width, dtype=dtype) for _ in "xr")
    weight, post_weight = random(generator, width), random(generator, width)
    assert_close(ops.rms_norm(x, weight, 1e-6), REFERENCE.rms_norm(x, weight, 1e-6))
    for post in (None, post_weight):
        mine, theirs = residual.clone(), residual.clone()
        got = ops.add_rms_norm(mine, x, weight, 1e-6, post)
        want = REFERENCE.add_rms_norm(theirs, x, weight, 1e-6, post)
        assert_close(mine, theirs, roundings=2)
        assert_close(got, want, roundings=3)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "rotary"), [((4, 1, 256), 256), ((3, 3, 20), 12), ((8, 2, 80), 80)])
@pytest.mark.parametrize("qk_norm", [False, True])
def test_rope_and_store(
    ops: NativeOps, dtype: torch.dtype, heads: tuple[int, int, int], rotary: int, qk_norm: bool
) -> None:
    generator = torch.Generator().manual_seed(1)
    batch, pages = step([(5, 9), (1, 33), (40, 40)], 4, generator)
    query_heads, kv_heads, dim = heads
    qkv = random(generator, int(batch.q_start[-1]), (query_heads + 2 * kv_heads) * dim, dtype=dtype)
    norms = (random(generator, dim), random(generator, dim), 1e-6) if qk_norm else None
    angles = random(generator, 64, rotary // 2)
    cos_sin = torch.cat((angles.cos(), angles.sin()), 1)
    caches = [torch.zeros(2, pages, 4, kv_heads, dim, dtype=dtype) for _ in range(2)]
    got = ops.rope_and_store(qkv, heads, norms, cos_sin, (caches[0][0], caches[0][1]), batch)
    want = REFERENCE.rope_and_store(qkv, heads, norms, cos_sin, (caches[1][0], caches[1][1]), batch)
    assert_close(got, want)
    assert_close(caches[0], caches[1])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("width", [1, 33, 2048])
def test_gated(ops: NativeOps, dtype: torch.dtype, activation: Activation, width: int) -> None:
    """Also far outside the range in which e^x is a float32."""
    gate_up = random(torch.Generator().manual_seed(2), 7, 2 * width, dtype=dtype) * 5
    gate_up[0, 0], gate_up[1, 0] = -300, 300
    got, want = ops.gated(gate_up, activation), REFERENCE.gated(gate_up, activation)
    torch.testing.assert_close(
        got.float(), want.float(), rtol=2**-7 if dtype == torch.bfloat16 else 1e-5, atol=2e-5
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocabulary", [1, 15, 1024, 5003])
def test_argmax(ops: NativeOps, dtype: torch.dtype, vocabulary: int) -> None:
    """With many equal values: the first index wins, also across pieces, and among -inf."""
    logits = random(torch.Generator().manual_seed(4), 6, vocabulary, dtype=dtype).round()
    logits[0] = float("-inf")
    logits[1] = 2.0
    logits[2] = -5.0
    logits[2, -1] = -4.0
    want = [row.index(max(row)) for row in logits.tolist()]
    assert ops.argmax(logits).tolist() == want


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 2), (33, 64), (100, 31), (640, 1024)])
@pytest.mark.parametrize("with_bias", [False, True])
def test_linear(ops: NativeOps, dtype: torch.dtype, shape: tuple[int, int], with_bias: bool) -> None:
    """Every number of rows of a tile, and more than one chunk; by our own product each row bit for bit as if alone."""
    generator = torch.Generator().manual_seed(5)
    weight = random(generator, *shape, dtype=dtype)
    bias = random(generator, shape[0], dtype=dtype) if with_bias else None
    linear = ops.pack_linear(weight, bias)
    x = random(generator, 200, shape[1], dtype=dtype)
    want = x.float() @ weight.float().T + (bias.float() if bias is not None else 0)
    for rows in [*range(1, 13), 97, 200]:
        got = linear(x[:rows])
        assert_close(got, want[:rows].to(dtype))
        if isinstance(linear, NativeLinear):
            assert torch.equal(got[-1:], linear(x[rows - 1 : rows]))
