"""Packed linear layers on the CPU, and which packing a weight gets.

Measured on 2 cores of Zen 4 (AVX512-BF16, no AMX): `native_linear.c` beats oneDNN's packed product at every number of
rows, by 1.5 for one row and by 1.05 to 1.1 for 64. With AMX oneDNN uses matrix units, which `native_linear.c` does not;
a CPU without bfloat16 products gets float32 weights.
"""

from __future__ import annotations

import ctypes
import functools
import logging

import torch
import torch.nn.functional as F
from torch import Tensor

from gapless.kernels.ops import Linear

log = logging.getLogger("gapless.kernels")

_BF16_PRODUCTS, _MATRIX_UNITS = 1, 2  # bits of features() in native_linear.c


def pack_linear(library: ctypes.CDLL, weight: Tensor, bias: Tensor | None) -> Linear:
    """Packs weight [out, in] and bias [out] in the layout that is fastest on this CPU."""
    features = library.features()
    if weight.dtype == torch.float32 or (features == _BF16_PRODUCTS and weight.shape[1] % 2 == 0):
        return NativeLinear(library, weight, bias)
    if weight.dtype == torch.bfloat16 and features & _MATRIX_UNITS and mkldnn_works():
        return MkldnnLinear(weight, bias)
    return lambda x: F.linear(x, weight, bias)


class NativeLinear:
    def __init__(self, library: ctypes.CDLL, weight: Tensor, bias: Tensor | None) -> None:
        self._run = library.linear
        self._out, self._in = weight.shape
        panel = library.panel_size()
        padded = -(-self._out // panel) * panel
        self._packed = torch.empty((padded, self._in), dtype=weight.dtype)
        self._is_bf16 = weight.dtype == torch.bfloat16
        weight = weight.contiguous()
        library.pack_linear(weight.data_ptr(), self._packed.data_ptr(), *weight.shape, self._is_bf16)
        self._bias = None if bias is None else F.pad(bias.float(), (0, padded - self._out))
        self._addresses = self._packed.data_ptr(), None if self._bias is None else self._bias.data_ptr()

    def __call__(self, x: Tensor) -> Tensor:
        rows = len(x)
        y = torch.empty((rows, self._out), dtype=x.dtype)
        self._run(x.data_ptr(), *self._addresses, y.data_ptr(), rows, self._out, self._in, self._is_bf16)
        return y


class MkldnnLinear:
    """oneDNN's prepacked inner product, through the operations that torch's inductor uses."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), 64)
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        y: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, self._bias, "none", [], "")
        return y


@functools.cache
def mkldnn_works() -> bool:
    """Whether torch's private packed product exists here and computes what F.linear does."""
    weight = torch.linspace(-1, 1, 32 * 64).reshape(32, 64).bfloat16()
    x, bias = torch.linspace(-1, 1, 3 * 64).reshape(3, 64).bfloat16(), torch.linspace(-1, 1, 32).bfloat16()
    try:
        got = MkldnnLinear(weight, bias)(x)
    except (AttributeError, RuntimeError, TypeError) as error:
        log.warning("torch's packed bfloat16 product is not usable, using F.linear: %s", error)
        return False
    return torch.allclose(
        got.float(), F.linear(x.float(), weight.float(), bias.float()), rtol=2**-6, atol=2**-6
    )
