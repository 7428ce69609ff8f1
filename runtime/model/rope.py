"""Tables of cosines and sines for rotary embeddings (RoFormer, arXiv 2104.09864) and their context scalings."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from gapless.runtime.model.config import Rope


def cos_sin_table(rope: Rope, head_dim: int, length: int) -> Tensor:
    """float32 [length, head_dim]: row p has the cosines of position p's angles, then their sines."""
    positions = torch.arange(length, dtype=torch.float32)
    angles = torch.outer(positions, _frequencies(rope, head_dim))
    return torch.cat((angles.cos(), angles.sin()), dim=-1) * rope.attention_factor


def _frequencies(rope: Rope, head_dim: int) -> Tensor:
    """Radians per position, float32 [head_dim / 2]."""
    plain = 1.0 / rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    if rope.kind == "linear":
        return plain / rope.factor
    if rope.kind == "llama3":
        return _llama3(plain, rope)
    if rope.kind == "yarn":
        return _yarn(plain, rope)
    return plain / torch.tensor(rope.divisors) if rope.divisors else plain


def _llama3(plain: Tensor, rope: Rope) -> Tensor:
    """Llama 3.1: slow frequencies are divided by the factor, fast ones kept, those between interpolated."""
    turns = rope.original_context * plain / (2 * math.pi)  # within the original context
    keep = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    return torch.lerp(plain / rope.factor, plain, keep.clamp(0, 1))


def _yarn(plain: Tensor, rope: Rope) -> Tensor:
    """YaRN (arXiv 2309.00071): the same, between two dimensions that are found from numbers of turns."""
    half = len(plain)

    def dimension(turns: float) -> float:
        return half * math.log(rope.original_context / (turns * 2 * math.pi)) / math.log(rope.theta)

    low = max(math.floor(dimension(rope.beta_fast)), 0)
    high = min(math.ceil(dimension(rope.beta_slow)), 2 * half - 1)
    divide = (torch.arange(half, dtype=torch.float32) - low) / max(high - low, 0.001)
    return torch.lerp(plain, plain / rope.factor, divide.clamp(0, 1))
