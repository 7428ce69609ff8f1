"""What an embedding must be."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from gapless.runtime.model.toy import ToyKnobs, toy_embedding, toy_entries


def toy_state(prompt: Sequence[int], knobs: ToyKnobs | None = None) -> NDArray[np.float32]:
    """The closed form of what the toy model says of a prompt, not yet normalised."""
    entries = toy_entries(np.array(prompt, np.int64), np.arange(len(prompt)))
    return toy_embedding(knobs or ToyKnobs(), entries.sum(dtype=np.uint64, keepdims=True))


def normalised(values: NDArray[np.float32], dimensions: int | None = None) -> NDArray[np.float64]:
    first = values[:dimensions].astype(np.float64)
    return first / np.sqrt((first**2).sum())
