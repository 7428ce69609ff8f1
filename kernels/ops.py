"""The operations that a decoder layer is made of: one protocol, several implementations.

`kernels.reference` is plain torch, runs on every device and defines what is right; `kernels.cpu` replaces it with
fused C on the CPU, `kernels.batched` with torch operations that never wait for a GPU. T = tokens of the step,
R = requests of the step, D = head dim, H / Hkv = query / KV heads. Activations are bfloat16 or float32; norm weights
are always float32 and multiply as they are (a model whose norm is `1 + w` adds the one when it loads); every reduction
is done in float32.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

from gapless.runtime.core.errors import ConfigError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Activation = Literal["silu", "gelu_tanh"]


@dataclass(frozen=True)
class StepBatch:
    """Where the tokens of one step are and what they may see. All tensors are int32 on the device.

    Row r owns the tokens q_start[r] .. q_start[r+1]-1, which are the last of its kv_len[r] positions. Its page i is
    page_table[slots[r], i], and position p lies in page p // page_size at offset p % page_size. Token t is
    stored at out_loc[t] = page * page_size + offset.
    """

    q_start: Tensor  # [R+1]
    kv_len: Tensor  # [R], counting this step's own tokens
    slots: Tensor  # [R]
    page_table: Tensor  # [slots, pages per request]
    positions: Tensor  # [T]
    out_loc: Tensor  # [T]
    page_size: int
    max_kv_len: int  # maximum of kv_len, known on the host
    max_q_len: int  # maximum of the rows' token counts, known on the host


class Linear(Protocol):
    """A weight in whatever layout its device likes best."""

    def __call__(self, x: Tensor) -> Tensor:
        """[T, in] to [T, out]."""
        ...


class Ops(Protocol):
    name: str

    def pack_linear(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        """Takes a [out, in] weight, which the caller must not use again."""
        ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """[T, N] normalised over its last axis, times weight [N]."""
        ...

    def add_rms_norm(
        self, residual: Tensor, x: Tensor, weight: Tensor, eps: float, post_weight: Tensor | None = None
    ) -> Tensor:
        """residual [T, N] += x, or rms_norm(x, post_weight) where given, in place; returns its norm by weight."""
        ...

    def rope_and_store(
        self,
        qkv: Tensor,
        heads: tuple[int, int, int],
        norms: tuple[Tensor, Tensor, float] | None,
        cos_sin: Tensor,
        cache: tuple[Tensor, Tensor],
        batch: StepBatch,
    ) -> Tensor:
        """QK-norm where given, rotary embedding, and KV store; returns q as [T, H, D].

        qkv is [T, (H + 2 Hkv) D] with all q heads first, then k, then v; heads = (H, Hkv, D); norms = (q weight [D], k
        weight [D], eps). cos_sin is float32 [max positions, rotary dim], its first half the cosines and its second half
        the sines; halves are rotated against each other, dimensions past the rotary dim pass through. cache = (k, v),
        each [pages, page_size, Hkv, D], written at batch.out_loc.
        """
        ...

    def attention(
        self,
        q: Tensor,
        cache: tuple[Tensor, Tensor],
        batch: StepBatch,
        scale: float,
        window: int | None,
        soft_cap: float | None,
    ) -> Tensor:
        """Causal paged attention, [T, H, D] to [T, H * D].

        The token at position p sees positions max(0, p - window + 1) .. p; scores are capped as
        soft_cap * tanh(score / soft_cap) where given.
        """
        ...

    def gated(self, gate_up: Tensor, activation: Activation) -> Tensor:
        """[T, 2F], gate in the first half, to activation(gate) * up, [T, F]."""
        ...

    def argmax(self, logits: Tensor) -> Tensor:
        """[R, V] to int64 [R]; the first index wins a tie."""
        ...


def choose_ops(backend: Literal["auto", "native", "torch"], device: torch.device) -> Ops:
    """The fastest implementation that works here; `native` raises ConfigError where it cannot be built.

    Kernels for a GPU are to be chosen here, in the place of the batched torch operations.
    """
    if device.type != "cpu":
        if backend == "native":
            raise ConfigError(
                "--attention-backend native: its kernels are for the CPU", param="attention_backend"
            )
        from gapless.kernels.batched import BatchedOps

        return BatchedOps()
    if backend != "torch":
        from gapless.kernels.cpu import native_ops

        found = native_ops(required=backend == "native")
        if found is not None:
            return found
    from gapless.kernels.reference import ReferenceOps

    return ReferenceOps()
