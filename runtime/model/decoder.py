"""One decoder for the whole family: Llama, Mistral, Qwen 2 and 3, Gemma 3. The config says what a layer has."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from gapless.kernels.ops import Linear, Ops, StepBatch
from gapless.runtime.model.config import ModelConfig
from gapless.runtime.model.loader_safetensors import StoredTensor
from gapless.runtime.model.rope import cos_sin_table


@dataclass(frozen=True, slots=True)
class _Layer:
    qkv: Linear
    output: Linear
    gate_up: Linear
    down: Linear
    qk_norms: tuple[Tensor, Tensor, float] | None
    attention_post_norm: Tensor | None
    mlp_norm: Tensor
    mlp_post_norm: Tensor | None
    next_norm: Tensor  # the next layer's attention norm; after the last layer, the final norm
    cos_sin: Tensor
    window: int | None


class Decoder:
    """Implements `interface.Model`. Matrices and activations are in `dtype`, norm weights in float32."""

    def __init__(
        self,
        config: ModelConfig,
        weights: Mapping[str, StoredTensor],
        dtype: torch.dtype,
        ops: Ops,
        device: torch.device,
    ) -> None:
        self.config = config
        self._dtype, self._ops, self._device = dtype, ops, device
        self._heads = (config.num_heads, config.num_kv_heads, config.head_dim)
        build = _Builder(config, weights, dtype, ops, device)
        self._embedding = build.matrix("token_embd")
        # transformers rounds the scale to the weights' dtype
        scale = config.embedding_scale
        self._embedding_scale = None if scale is None else torch.tensor(scale, dtype=dtype).item()
        self._first_norm = build.norm("blk.0.attn_norm")
        self._layers = [build.layer(i) for i in range(config.num_layers)]
        # Loaded again where it is tied, since a packed weight belongs to its Linear; pages of the file are shared.
        self._head = ops.pack_linear(build.matrix("token_embd" if config.tied_head else "output"))

    def new_cache(self, pages: int, page_size: int) -> Tensor:
        shape = (len(self._layers), 2, pages, page_size, self.config.num_kv_heads, self.config.head_dim)
        return torch.zeros(shape, dtype=self._dtype, device=self._device)

    def forward(self, ids: Tensor, cache: list[tuple[Tensor, Tensor]], batch: StepBatch) -> Tensor:
        config, ops, eps = self.config, self._ops, self.config.norm_eps
        residual = F.embedding(ids, self._embedding)
        if self._embedding_scale is not None:
            residual *= self._embedding_scale
        x = ops.rms_norm(residual, self._first_norm, eps)
        for layer, kv in zip(self._layers, cache, strict=True):
            q = ops.rope_and_store(layer.qkv(x), self._heads, layer.qk_norms, layer.cos_sin, kv, batch)
            x = ops.attention(q, kv, batch, config.attention_scale, layer.window, config.attention_soft_cap)
            x = ops.add_rms_norm(residual, layer.output(x), layer.mlp_norm, eps, layer.attention_post_norm)
            x = layer.down(ops.gated(layer.gate_up(x), config.activation))
            x = ops.add_rms_norm(residual, x, layer.next_norm, eps, layer.mlp_post_norm)
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        logits = self._head(hidden)
        cap = self.config.logit_soft_cap
        return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)


class _Builder:
    """Takes tensors from the files one at a time and packs them."""

    def __init__(
        self,
        config: ModelConfig,
        weights: Mapping[str, StoredTensor],
        dtype: torch.dtype,
        ops: Ops,
        device: torch.device,
    ) -> None:
        self.config, self.weights, self.dtype, self.ops, self.device = config, weights, dtype, ops, device
        self.tables = {
            rope: cos_sin_table(rope, config.head_dim, config.context_length).to(device)
            for rope in set(config.ropes)
        }

    def layer(self, i: int) -> _Layer:
        config, at = self.config, f"blk.{i}."
        last = i == config.num_layers - 1
        qk_norms = None
        if config.qk_norm:
            qk_norms = (self.norm(at + "attn_q_norm"), self.norm(at + "attn_k_norm"), config.norm_eps)
        return _Layer(
            qkv=self.linear(at + "attn_q", at + "attn_k", at + "attn_v"),
            output=self.linear(at + "attn_output"),
            gate_up=self.linear(at + "ffn_gate", at + "ffn_up"),
            down=self.linear(at + "ffn_down"),
            qk_norms=qk_norms,
            attention_post_norm=self.norm(at + "post_attention_norm") if config.sandwich_norms else None,
            mlp_norm=self.norm(at + "ffn_norm"),
            mlp_post_norm=self.norm(at + "post_ffw_norm") if config.sandwich_norms else None,
            next_norm=self.norm("output_norm" if last else f"blk.{i + 1}.attn_norm"),
            cos_sin=self.tables[config.ropes[i]],
            window=config.windows[i],
        )

    def load(self, name: str, dtype: torch.dtype) -> Tensor:
        return self.weights[name].load().to(self.device, dtype)

    def matrix(self, name: str) -> Tensor:
        return self.load(name + ".weight", self.dtype)

    def norm(self, name: str) -> Tensor:
        return self.load(name + ".weight", torch.float32) + self.config.norm_offset

    def linear(self, *names: str) -> Linear:
        """One product for the weights of `names`, stacked."""
        bias = None
        if names[0] + ".bias" in self.weights:
            bias = torch.cat([self.load(name + ".bias", self.dtype) for name in names])
        weights = [self.matrix(name) for name in names]
        return self.ops.pack_linear(weights[0] if len(weights) == 1 else torch.cat(weights), bias)
