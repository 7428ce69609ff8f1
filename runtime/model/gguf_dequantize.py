"""Turns ggml's block formats into float32, whole tensors at a time.

A block is a run of 32 or 256 weights that share a float16 scale. Layouts are those of ggml's `ggml-common.h`; the
order of the operations is that of its reference code, so that the results agree to the bit.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def dequantize(raw: Tensor, type_name: str, shape: tuple[int, ...]) -> Tensor:
    """uint8 bytes of `type_name`, a name of `core.gguf.GGML_TYPES`, to a float32 tensor of `shape`."""
    if type_name in _PLAIN:
        return raw.view(_PLAIN[type_name]).float().view(shape)
    block_bytes, decode = _BLOCKS[type_name]
    return decode(raw.view(-1, block_bytes)).reshape(shape)


_PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def _half(blocks: Tensor, start: int) -> Tensor:
    """The float16 at byte `start` of every block, as float32 [blocks, 1]."""
    return blocks[:, start : start + 2].contiguous().view(torch.float16).float()


def _nibbles(packed: Tensor) -> Tensor:
    """[..., n] bytes to [..., 2n]: all low halves, then all high ones."""
    return torch.cat((packed & 15, packed >> 4), dim=-1)


def _bits(packed: Tensor, width: int) -> Tensor:
    """[..., n] bytes to [..., 8 / width, n]: field i of every byte, lowest first."""
    shifts = torch.arange(0, 8, width, dtype=torch.uint8)
    return packed.unsqueeze(-2) >> shifts.unsqueeze(-1) & (1 << width) - 1


def _fifth_bits(packed: Tensor) -> Tensor:
    """Four bytes a block to its 32 bits, each worth 16."""
    return _bits(packed, 1).transpose(-1, -2).flatten(-2) << 4


def _q4_0(blocks: Tensor) -> Tensor:
    return _half(blocks, 0) * (_nibbles(blocks[:, 2:]).float() - 8)


def _q4_1(blocks: Tensor) -> Tensor:
    return _half(blocks, 0) * _nibbles(blocks[:, 4:]).float() + _half(blocks, 2)


def _q5_0(blocks: Tensor) -> Tensor:
    q = _nibbles(blocks[:, 6:]) | _fifth_bits(blocks[:, 2:6])
    return _half(blocks, 0) * (q.float() - 16)


def _q5_1(blocks: Tensor) -> Tensor:
    q = _nibbles(blocks[:, 8:]) | _fifth_bits(blocks[:, 4:8])
    return _half(blocks, 0) * q.float() + _half(blocks, 2)


def _q8_0(blocks: Tensor) -> Tensor:
    return _half(blocks, 0) * blocks[:, 2:].view(torch.int8).float()


def _scales_and_minima(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """The eight 6-bit scales and minima of a K block, times its two float16 factors, each [blocks, 8, 1].

    Bytes 4..7 hold the first four scales and bytes 8..11 the first four minima in their low six bits; the later four
    have their low halves in the nibbles of bytes 12..15 and their high bits on top of the earlier eight bytes.
    """
    low_d, low_m, mixed = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = torch.cat((low_d & 63, mixed & 15 | low_d >> 2 & 48), dim=1).float()
    minima = torch.cat((low_m & 63, mixed >> 4 | low_m >> 2 & 48), dim=1).float()
    return (_half(blocks, 0) * scales).unsqueeze(-1), (_half(blocks, 2) * minima).unsqueeze(-1)


def _q4_k(blocks: Tensor) -> Tensor:
    scales, minima = _scales_and_minima(blocks)
    q = _nibbles(blocks[:, 16:].view(-1, 4, 32)).view(-1, 8, 32)
    return scales * q.float() - minima


def _q5_k(blocks: Tensor) -> Tensor:
    scales, minima = _scales_and_minima(blocks)
    low = _nibbles(blocks[:, 48:].view(-1, 4, 32)).view(-1, 8, 32)
    q = low | _bits(blocks[:, 16:48], 1) << 4
    return scales * q.float() - minima


def _q6_k(blocks: Tensor) -> Tensor:
    scales = _half(blocks, 208) * blocks[:, 192:208].view(torch.int8).float()
    low = _nibbles(blocks[:, :128].view(-1, 2, 64)).view(-1, 8, 32)
    high = _bits(blocks[:, 128:192].view(-1, 2, 32), 2).reshape(-1, 8, 32)
    q = (low | high << 4).view(-1, 16, 16)
    return scales.unsqueeze(-1) * (q.float() - 32)


# Bytes in a block, and its decoder: uint8 [blocks, bytes] to float32 [blocks, weights in some shape].
_BLOCKS: dict[str, tuple[int, Callable[[Tensor], Tensor]]] = {
    "Q4_0": (18, _q4_0),
    "Q4_1": (20, _q4_1),
    "Q5_0": (22, _q5_0),
    "Q5_1": (24, _q5_1),
    "Q8_0": (34, _q8_0),
    "Q4_K": (144, _q4_k),
    "Q5_K": (176, _q5_k),
    "Q6_K": (210, _q6_k),
}
