"""A plan's fields as tensors."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from gapless.runtime.core.plan import Place

_FLOATS = {4: torch.float32, 8: torch.float64}


class PlanTensors:
    """Views of `words`, int32: the words of a plan's buffer, on whatever device they are."""

    def __init__(self, words: Tensor, places: Mapping[str, Place]) -> None:
        self._words, self._places = words, places

    def __getitem__(self, name: str) -> Tensor:
        start, words, dtype, shape = self._places[name]
        field = self._words[start : start + words]
        if dtype.kind == "f":
            field = field.view(_FLOATS[dtype.itemsize])
        return field if len(shape) == 1 else field.view(shape)
