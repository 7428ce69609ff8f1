"""All that the device needs for one step. Immutable once launched."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

I32 = NDArray[np.int32]


@dataclass(frozen=True)
class Plan:
    """R rows with T new tokens in all, of which K rows sample.

    Row r computes the tokens q_start[r] .. q_start[r+1]-1, at the positions that end with kv_len[r] - 1.
    An id below zero is a future token: -slot stands for what the last launched step sampled for that slot. Changes
    of the device's page table are applied before anything reads it; steps run in launch order.
    """

    step: int  # launches count from 1
    slots: I32  # [R]
    generations: I32  # [R], of each slot's request
    q_start: I32  # [R+1]
    kv_len: I32  # [R]
    ids: I32  # [T]
    positions: I32  # [T]
    out_loc: I32  # [T], page * page_size + offset
    table_slots: I32  # [U], with the next two: page_table[slot, column] = page
    table_columns: I32  # [U]
    table_pages: I32  # [U]
    sample_rows: I32  # [K], indices into the rows; the last token of each is sampled from
    output_index: I32  # [K], output tokens before the one that is sampled
    all_greedy: bool
    temperature: NDArray[np.float32]  # [K], 0 is greedy
    top_k: I32  # [K], -1 is off
    top_p: NDArray[np.float32]  # [K]
    min_p: NDArray[np.float32]  # [K]
    uniform: NDArray[np.float64]  # [K], a random number in [0, 1) a row
    max_q_len: int
    max_kv_len: int


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
