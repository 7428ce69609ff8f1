"""All that the device needs for one step, in one buffer. Immutable once launched."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gapless.runtime.core.sampling import SamplingParams

I32 = NDArray[np.int32]
F32 = NDArray[np.float32]
_WORDS = {"i4": 1, "f4": 1, "f8": 2}


class PlanBuffer:
    """One array of 32-bit words, cut into named fields: one transfer brings a whole plan to a device.

    `fields` names each field's dtype ("i4", "f4" or "f8") and shape. Fields start at even words, so that float64
    is aligned. `places[name]` is (first word, words, dtype, shape), from which a device finds them in its copy.
    """

    def __init__(self, fields: dict[str, tuple[str, tuple[int, ...]]]) -> None:
        self.places: dict[str, tuple[int, int, str, tuple[int, ...]]] = {}
        end = 0
        for name, (dtype, shape) in fields.items():
            words = _WORDS[dtype]
            for size in shape:
                words *= size
            self.places[name] = (end, words, dtype, shape)
            end += words + (words & 1)
        self.words: I32 = np.empty(end, np.int32)

    def __getitem__(self, name: str) -> NDArray[Any]:
        start, words, dtype, shape = self.places[name]
        return self.words[start : start + words].view(dtype).reshape(shape)


@dataclass(frozen=True)
class Sampling:
    """How K rows are sampled. All arrays are [K], views of the plan's buffer.

    `adjusted` are the indices of those whose logits the sampler must change first: penalties, bias, min_new_tokens.
    """

    slots: I32
    output_index: I32  # output tokens before the one that is sampled
    temperature: F32  # 0 is greedy
    top_p: F32
    min_p: F32
    top_k: I32  # -1 is off
    uniform: NDArray[np.float64]  # a random number in [0, 1) a row
    all_greedy: bool
    adjusted: tuple[int, ...] = ()


@dataclass(frozen=True)
class SlotSetup:
    """What the sampler must know of a request whose logits it will adjust; sent with the first plan of the request."""

    slot: int
    prompt: I32
    stop_ids: tuple[int, ...]
    params: SamplingParams


@dataclass(frozen=True)
class Plan:
    """R rows with T new tokens in all, of which K are sampled and H keep their logits for later.

    Row r computes the tokens q_start[r] .. q_start[r+1]-1, at the positions that end with kv_len[r] - 1. An id below
    zero is a future token: -slot stands for what was last sampled for that slot.

    A step does, in this order: setups, changes of the page table, late sampling, forward, sampling. Late sampling
    picks from the logits that an earlier step kept for its slots, under `late_masks` (bit v of a row, in words of 32
    bits, allows id v), and what it picks is a future token for this step's own forward. Steps run in launch order.
    """

    step: int  # launches count from 1
    buffer: PlanBuffer
    slots: I32  # [R]
    generations: I32  # [R], of each slot's request
    q_start: I32  # [R+1]
    kv_len: I32  # [R]
    ids: I32  # [T]
    positions: I32  # [T]
    out_loc: I32  # [T], page * page_size + offset
    table: I32  # [3, U]: page_table[table[0], table[1]] = table[2]
    sample_rows: I32  # [K], indices into the rows; the last token of each is sampled from
    sampling: Sampling  # of these rows
    held_rows: I32  # [H], rows whose last token's logits are kept in their slots' buffers
    late: Sampling  # of [L] slots
    late_generations: I32  # [L]
    late_masks: I32  # [L, words]
    max_q_len: int
    max_kv_len: int
    setups: tuple[SlotSetup, ...] = field(default=())


@dataclass(frozen=True)
class DeviceInfo:
    """What a device says of itself once its model is loaded."""

    description: str  # which device and why
    dtype: str
    vocab_size: int
    context_length: int
    eos_token_ids: tuple[int, ...]
    pages: int  # usable pages, numbered from 1
    load_seconds: float
    attention_backend: str
    architecture: str
