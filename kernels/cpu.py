"""The operations on the CPU: fused C kernels (`native.c`) over bfloat16 or float32, called through ctypes.

Only for the one thread that runs the device: an OpenMP team belongs to the thread that forks it, so a second thread
calling torch or these would start a second team.
"""

from __future__ import annotations

import ctypes
import logging
from pathlib import Path

import torch
from torch import Tensor

from gapless.kernels.compile import CompileError, compile_kernels
from gapless.kernels.cpu_linear import pack_linear
from gapless.kernels.ops import Activation, Linear, StepBatch
from gapless.runtime.core.errors import ConfigError

log = logging.getLogger("gapless.kernels")

_BF16 = torch.bfloat16
_TYPES = {"p": ctypes.c_void_p, "i": ctypes.c_int64, "f": ctypes.c_float}
_SIGNATURES = {
    "native_init": "p",
    "rms_norm": "pppppiifi",
    "rope_and_store": "pppppppppiiiiifi",
    "attention": "ppppppppiiiiiiiffi",
    "gated": "ppiiii",
    "argmax": "ppiii",
    "linear": "ppppiiii",
    "pack_linear": "ppiii",
    "panel_size": "",
    "features": "",
}


def native_ops(required: bool) -> NativeOps | None:
    """The C kernels, compiled if need be; where that fails, ConfigError if `required`, else one log line and None."""
    try:
        return NativeOps(load_kernels(compile_kernels()))
    except CompileError as error:
        if required:
            raise ConfigError(f"--attention-backend native: {error}") from error
        log.warning("using plain torch operations, several times slower: %s", error)
        return None


def load_kernels(path: Path) -> ctypes.CDLL:
    """Loads the library at `path` and joins it to the OpenMP runtime that torch uses; raises CompileError."""
    torch_library = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    try:
        library = ctypes.CDLL(str(path))
        # Found in whichever OpenMP runtime libtorch_cpu depends on.
        gomp_parallel = ctypes.CDLL(str(torch_library)).GOMP_parallel
    except (OSError, AttributeError) as error:
        raise CompileError(f"cannot load the compiled kernels beside torch: {error}") from error
    for name, parameters in _SIGNATURES.items():
        function = getattr(library, name)
        function.argtypes = [_TYPES[letter] for letter in parameters]
        function.restype = ctypes.c_int64 if not parameters else None
    library.native_init(ctypes.cast(gomp_parallel, ctypes.c_void_p))
    return library


class NativeOps:
    """Implements `kernels.ops.Ops` for contiguous tensors. A row's result does not depend on the others of its step,
    but for bfloat16 products on a CPU that has no instruction for them or has AMX: those are torch's."""

    name = "native"

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library

    def pack_linear(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        return pack_linear(self._library, weight, bias)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return self._norm(x, None, weight, None, eps)

    def add_rms_norm(
        self, residual: Tensor, x: Tensor, weight: Tensor, eps: float, post_weight: Tensor | None = None
    ) -> Tensor:
        return self._norm(x, residual, weight, post_weight, eps)

    def _norm(
        self, x: Tensor, residual: Tensor | None, weight: Tensor, post_weight: Tensor | None, eps: float
    ) -> Tensor:
        out = torch.empty_like(x)
        self._library.rms_norm(
            x.data_ptr(),
            None if residual is None else residual.data_ptr(),
            out.data_ptr(),
            weight.data_ptr(),
            None if post_weight is None else post_weight.data_ptr(),
            *x.shape,
            eps,
            x.dtype is _BF16,
        )
        return out

    def rope_and_store(
        self,
        qkv: Tensor,
        heads: tuple[int, int, int],
        norms: tuple[Tensor, Tensor, float] | None,
        cos_sin: Tensor,
        cache: tuple[Tensor, Tensor],
        batch: StepBatch,
    ) -> Tensor:
        tokens, (query_heads, _, head_dim) = len(qkv), heads
        q = torch.empty((tokens, query_heads, head_dim), dtype=qkv.dtype)
        self._library.rope_and_store(
            qkv.data_ptr(),
            q.data_ptr(),
            cache[0].data_ptr(),
            cache[1].data_ptr(),
            norms[0].data_ptr() if norms else None,
            norms[1].data_ptr() if norms else None,
            cos_sin.data_ptr(),
            batch.positions.data_ptr(),
            batch.out_loc.data_ptr(),
            tokens,
            *heads,
            cos_sin.shape[1],
            norms[2] if norms else 0.0,
            qkv.dtype is _BF16,
        )
        return q

    def attention(
        self,
        q: Tensor,
        cache: tuple[Tensor, Tensor],
        batch: StepBatch,
        scale: float,
        window: int | None,
        soft_cap: float | None,
    ) -> Tensor:
        tokens, heads, head_dim = q.shape
        out = torch.empty((tokens, heads * head_dim), dtype=q.dtype)
        self._library.attention(
            q.data_ptr(),
            cache[0].data_ptr(),
            cache[1].data_ptr(),
            out.data_ptr(),
            batch.q_start.data_ptr(),
            batch.kv_len.data_ptr(),
            batch.slots.data_ptr(),
            batch.page_table.data_ptr(),
            len(batch.kv_len),
            batch.page_table.shape[1],
            batch.page_size,
            heads,
            cache[0].shape[2],
            head_dim,
            window or 0,
            scale,
            soft_cap or 0.0,
            q.dtype is _BF16,
        )
        return out

    def gated(self, gate_up: Tensor, activation: Activation) -> Tensor:
        tokens, width = gate_up.shape
        out = torch.empty((tokens, width // 2), dtype=gate_up.dtype)
        self._library.gated(
            gate_up.data_ptr(),
            out.data_ptr(),
            tokens,
            width // 2,
            activation == "gelu_tanh",
            gate_up.dtype is _BF16,
        )
        return out

    def argmax(self, logits: Tensor) -> Tensor:
        out = torch.empty(len(logits), dtype=torch.int64)
        self._library.argmax(logits.data_ptr(), out.data_ptr(), *logits.shape, logits.dtype is _BF16)
        return out
