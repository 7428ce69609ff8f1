"""What the composer decides and the plan builder carries out."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from gapless.runtime.core.plan import I32, Slots, SlotSetup

NONE: Slots = np.empty(0, np.intp)
NO_INTS: I32 = np.empty(0, np.int32)
NO_MASKS: I32 = np.empty((0, 0), np.int32)


class Composition(NamedTuple):
    """What one step computes."""

    decode: Slots  # slots that compute one token each
    chunks: list[tuple[int, int]]  # slot and number of prompt tokens
    flags_seen: int  # all flags that any of the decoding slots has, and perhaps more
    late: Slots = NONE  # slots whose kept logits are sampled from first
    late_masks: I32 = NO_MASKS
    setups: tuple[SlotSetup, ...] = ()

    @property
    def is_empty(self) -> bool:
        return not (self.decode.size or self.chunks or self.late.size)
