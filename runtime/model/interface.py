"""What the worker needs of a model: `load_model` gives one of these."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from gapless.kernels.ops import StepBatch
    from gapless.runtime.model.config import ModelConfig


class Model(Protocol):
    config: ModelConfig

    def new_cache(self, pages: int, page_size: int) -> Tensor:
        """[layers, 2, pages, page_size, Hkv, D], zeroed: each layer's K and V; one tensor, so that one operation can
        copy a page of all layers."""
        ...

    def forward(self, ids: Tensor, cache: list[tuple[Tensor, Tensor]], batch: StepBatch) -> Tensor:
        """int64 ids [T] to the final, normed hidden states [T, N]; writes the KV of every token.

        `cache` has the K and V of each layer, as `new_cache` made them.
        """
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """[R, N] (the rows that sample) to [R, vocabulary], in the model's dtype, soft cap applied."""
        ...
