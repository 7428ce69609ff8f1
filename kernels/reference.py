"""The decoder's operations in plain torch: runs on every device, and defines what the fused kernels must compute."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from gapless.kernels.ops import Activation, Linear, StepBatch


class ReferenceOps:
    """Implements `kernels.ops.Ops`. Each operation computes in float32 and rounds once, to the activations' dtype."""

    name = "torch"

    def pack_linear(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        return lambda x: F.linear(x, weight, bias)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return _rms_norm(x, weight, eps).to(x.dtype)

    def add_rms_norm(
        self, residual: Tensor, x: Tensor, weight: Tensor, eps: float, post_weight: Tensor | None = None
    ) -> Tensor:
        residual += x if post_weight is None else self.rms_norm(x, post_weight, eps)
        return self.rms_norm(residual, weight, eps)

    def rope_and_store(
        self,
        qkv: Tensor,
        heads: tuple[int, int, int],
        norms: tuple[Tensor, Tensor, float] | None,
        cos_sin: Tensor,
        cache: tuple[Tensor, Tensor],
        batch: StepBatch,
    ) -> Tensor:
        query_heads, kv_heads, head_dim = heads
        parts = qkv.view(len(qkv), -1, head_dim)
        q, k = parts[:, :query_heads].float(), parts[:, query_heads:-kv_heads].float()
        v = parts[:, -kv_heads:]
        if norms is not None:
            q_weight, k_weight, eps = norms
            q, k = _rms_norm(q, q_weight, eps), _rms_norm(k, k_weight, eps)
        angles = cos_sin[batch.positions, None]
        keys, values = (pages.flatten(0, 1) for pages in cache)
        keys[batch.out_loc] = _rotate(k, angles).to(keys.dtype)
        values[batch.out_loc] = v.to(values.dtype)
        return _rotate(q, angles).to(qkv.dtype)

    def attention(
        self,
        q: Tensor,
        cache: tuple[Tensor, Tensor],
        batch: StepBatch,
        scale: float,
        window: int | None,
        soft_cap: float | None,
    ) -> Tensor:
        out = torch.empty_like(q)
        starts, lengths = batch.q_start.tolist(), batch.kv_len.tolist()
        for slot, begin, end, length in zip(batch.slots.tolist(), starts, starts[1:], lengths, strict=False):
            first = length - (end - begin)  # position of the row's first query
            oldest = 0 if window is None else max(0, first - window + 1)
            positions = torch.arange(oldest, length, device=q.device)
            pages = batch.page_table[slot, positions // batch.page_size]
            k, v = (pool[pages, positions % batch.page_size].float() for pool in cache)
            ago = torch.arange(first, length, device=q.device)[:, None] - positions
            hidden = ago < 0 if window is None else (ago < 0) | (ago >= window)
            out[begin:end] = _attend(q[begin:end].float(), k, v, hidden, scale, soft_cap)
        return out.flatten(1)

    def gated(self, gate_up: Tensor, activation: Activation) -> Tensor:
        gate, up = gate_up.float().chunk(2, dim=-1)
        active = F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")
        return (active * up).to(gate_up.dtype)

    def argmax(self, logits: Tensor) -> Tensor:
        return logits.argmax(dim=-1)


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    x = x.float()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def _rotate(x: Tensor, cos_sin: Tensor) -> Tensor:
    """Rotates the first dimensions of x [T, heads, D] by cos_sin [T, 1, rotary dim]; the rest pass through."""
    rotary = cos_sin.shape[-1]
    cos, sin = cos_sin.chunk(2, dim=-1)
    a, b = x[..., :rotary].chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin, x[..., rotary:]), dim=-1)


def _attend(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor, scale: float, soft_cap: float | None) -> Tensor:
    """One row: q [Q, H, D] over k and v [S, Hkv, D], without the pairs that `hidden` [Q, S] marks, to [Q, H, D]."""
    queries, heads, head_dim = q.shape
    grouped = q.view(queries, k.shape[1], -1, head_dim)
    scores = torch.einsum("qkgd,skd->kgqs", grouped, k) * scale
    if soft_cap is not None:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
    return torch.einsum("kgqs,skd->qkgd", weights, v).reshape(queries, heads, head_dim)
