"""A plan's fields as tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

from gapless.runtime.core.plan import Place, PlanBuffer

_FLOATS = {4: torch.float32, 8: torch.float64}


class Fields(Protocol):
    """The fields of a plan's buffer by name."""

    def __getitem__(self, name: str) -> Tensor: ...


class HostFields:
    """Views of the buffer itself."""

    def __init__(self, buffer: PlanBuffer) -> None:
        self._buffer = buffer

    def __getitem__(self, name: str) -> Tensor:
        return torch.from_numpy(self._buffer[name])


class DeviceFields:
    """Views of `words`, int32: a copy of the buffer's words on some device."""

    def __init__(self, words: Tensor, places: Mapping[str, Place]) -> None:
        self._words, self._places = words, places

    def __getitem__(self, name: str) -> Tensor:
        start, words, dtype, shape = self._places[name]
        field = self._words[start : start + words]
        if dtype.kind == "f":
            field = field.view(_FLOATS[dtype.itemsize])
        return field if len(shape) == 1 else field.view(shape)
