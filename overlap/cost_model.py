"""How long a step takes on a GPU, by the roofline model (Williams, Waterman and Patterson, 2009).

A step takes as long as its arithmetic or its memory traffic, whichever is longer, at the peak rates of the device, and
a fixed time for its launch; before that come the pages that it copies, at the rate of the link or of the memory. Real
kernels stay below the peaks, so the step is shorter than a real one: what the host hides behind it, it hides behind the
real one too. The size of the memory is not part of the model.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gapless.runtime.core.errors import ConfigError, ModelLoadError
from gapless.runtime.core.model_path import resolve_model_path
from gapless.runtime.core.plan import MoveCosts, Plan
from gapless.runtime.model.config import ModelConfig

VALUE_BYTES = 2  # bfloat16 weights and KV
LAUNCH_S = 10e-6  # a step replayed as one CUDA graph


@dataclass(frozen=True)
class DeviceProfile:
    flops: float  # dense bfloat16 on the tensor cores, FLOP/s
    bandwidth: float  # of the device's memory, bytes/s
    link: float  # to the host, bytes/s one way


# NVIDIA's data sheets of the SXM boards ("NVIDIA A100 Tensor Core GPU", 80 GB; "NVIDIA H100 Tensor Core GPU"; "NVIDIA
# H200 Tensor Core GPU"). Hopper's are given there with 2:4 sparsity (1979 TFLOPS); dense is half of that. So are links
# with both directions together (PCIe Gen4 x16: 64 GB/s, Gen5: 128 GB/s).
PROFILES = {
    "A100": DeviceProfile(312e12, 2.039e12, 32e9),
    "H100": DeviceProfile(989.5e12, 3.35e12, 64e9),
    "H200": DeviceProfile(989.5e12, 4.8e12, 64e9),
}


@dataclass(frozen=True)
class ModelShape:
    """What of a decoder decides its cost. `layers` counts them by attention window; None is full attention."""

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    layers: tuple[tuple[int | None, int], ...]

    @property
    def body_weights(self) -> int:
        """Weights of the matrix products of all layers."""
        attention = self.hidden_size * self.head_dim * (2 * self.num_heads + 2 * self.num_kv_heads)
        mlp = 3 * self.hidden_size * self.intermediate_size
        return (attention + mlp) * sum(count for _, count in self.layers)

    @property
    def head_weights(self) -> int:
        return self.hidden_size * self.vocab_size

    @property
    def kv_values(self) -> int:
        """Of one token, all layers."""
        return 2 * self.num_kv_heads * self.head_dim * sum(count for _, count in self.layers)

    @classmethod
    def of(cls, config: ModelConfig) -> ModelShape:
        return cls(
            config.hidden_size,
            config.intermediate_size,
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
            config.vocab_size,
            tuple(Counter(config.windows).items()),
        )


# From the models' own config.json.
SHAPES = {
    "gemma-3-270m": ModelShape(640, 2048, 4, 1, 256, 262_144, ((512, 15), (None, 3))),
    "qwen3-0.6b": ModelShape(1024, 3072, 16, 8, 128, 151_936, ((None, 28),)),
    "llama-3-8b": ModelShape(4096, 14_336, 32, 8, 128, 128_256, ((None, 32),)),
    "llama-3-70b": ModelShape(8192, 28_672, 64, 8, 128, 128_256, ((None, 80),)),
}


def shape_named(model: str) -> ModelShape:
    """A preset, or the shape of the model at a path; raises ConfigError naming --sim-model."""
    if model in SHAPES:
        return SHAPES[model]
    try:
        return ModelShape.of(ModelConfig.from_source(resolve_model_path(model)))
    except (ModelLoadError, ValueError) as error:
        known = ", ".join(SHAPES)
        raise ConfigError(f"--sim-model {model}: neither one of {known} nor a model ({error})") from error


def move_costs(shape: ModelShape, link: float, flops: float, value_bytes: int = VALUE_BYTES) -> MoveCosts:
    """For a device with these rates, bytes/s and FLOP/s.

    A layer with an attention window is counted as one without: a little too much where a request is longer.
    """
    layers = sum(count for _, count in shape.layers)
    return MoveCosts(
        kv_bytes=shape.kv_values * value_bytes,
        link=link,
        flops=flops,
        token_flops=2.0 * shape.body_weights,
        pair_flops=4.0 * shape.num_heads * shape.head_dim * layers,
    )


@dataclass(frozen=True)
class CostModel:
    device: DeviceProfile
    model: ModelShape
    page_size: int = 16  # of the pages that plans copy

    def __call__(self, plan: Plan) -> float:
        """Seconds of one step."""
        return LAUNCH_S + self._copies(plan) + self._compute(plan)

    def _copies(self, plan: Plan) -> float:
        """Seconds of the copies of pages; within the device's memory each is read and written."""
        device, seconds = self.device, 0.0
        for copy in plan.copies:
            count = len(copy.source) * VALUE_BYTES * self.model.kv_values * self.page_size
            seconds += 2 * count / device.bandwidth if copy.kind == "page" else count / device.link
        return seconds

    def _compute(self, plan: Plan) -> float:
        if not len(plan.ids):
            return 0.0
        tokens, model = len(plan.ids), self.model
        logits = len(plan.sample_rows) + len(plan.held_rows)
        pairs, positions = self._attention(plan)
        flops = 2.0 * (model.body_weights * tokens + model.head_weights * logits)
        flops += 4.0 * model.num_heads * model.head_dim * pairs
        values = model.body_weights + (model.head_weights if logits else 0)
        values += 2 * model.num_kv_heads * model.head_dim * positions
        return max(flops / self.device.flops, VALUE_BYTES * values / self.device.bandwidth)

    def _attention(self, plan: Plan) -> tuple[int, int]:
        """(query, key) pairs, and KV positions read or written, over all layers. A chunk reads its keys once."""
        end = plan.kv_len.astype(np.int64)
        new = np.diff(plan.q_start)
        pairs = positions = 0
        for window, layers in self.model.layers:
            width = int(end.max()) if window is None else window
            pairs += layers * int((_pairs_up_to(end, width) - _pairs_up_to(end - new, width)).sum())
            positions += layers * int((np.minimum(end, width + new - 1) + new).sum())
        return pairs, positions


def _pairs_up_to(length: NDArray[np.int64], window: int) -> NDArray[np.int64]:
    """The sum of min(n, window) for n from 1 to length: keys that the first `length` queries see."""
    inside = np.minimum(length, window)
    pairs: NDArray[np.int64] = inside * (inside + 1) // 2 + (length - inside) * window
    return pairs
