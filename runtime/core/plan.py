"""All that the device needs for one step, in one buffer. Immutable once launched."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from gapless.runtime.core.logprobs import LogprobRow
from gapless.runtime.core.sampling import SamplingParams

I32 = NDArray[np.int32]
Slots = NDArray[
    np.intp
]  # what the host indexes with: numpy converts any other integer at twice the cost of indexing
F32 = NDArray[np.float32]
_INTS, _FLOATS, _DOUBLES = np.dtype(np.int32), np.dtype(np.float32), np.dtype(np.float64)
Place = tuple[int, int, "np.dtype[Any]", tuple[int, ...]]  # first word, number of words, dtype, shape


class PlanBuffer:
    """One array of 32-bit words, cut into named fields: one transfer brings a whole plan to a device.

    `places[name]` says where a field is, from which a device finds it in its copy. Fields start at even words, so that
    float64 is aligned.
    """

    def __init__(self, *sizes: int) -> None:
        """The sizes are the parameters of `layout`."""
        words, self.places = layout(*sizes)
        self.words: I32 = np.empty(words, np.int32)

    def __getitem__(self, name: str) -> NDArray[Any]:
        start, words, dtype, shape = self.places[name]
        field = self.words[start : start + words]
        if dtype is not _INTS:
            field = field.view(dtype)
        return field if len(shape) == 1 else field.reshape(shape)


@lru_cache(maxsize=4096)
def layout(
    rows: int, tokens: int, updates: int, samples: int, held: int, late: int, mask_words: int
) -> tuple[int, dict[str, Place]]:
    """The number of words, and each field's place; the fields are those of Plan and Sampling."""
    fields: dict[str, tuple[np.dtype[Any], tuple[int, ...]]] = {
        "slots": (_INTS, (rows,)),
        "q_start": (_INTS, (rows + 1,)),
        "kv_len": (_INTS, (rows,)),
        "tokens": (_INTS, (3, tokens)),  # ids, positions, out_loc
        "sample_rows": (_INTS, (samples,)),
        "held_rows": (_INTS, (held,)),
        "late_masks": (_INTS, (late, mask_words)),
    }
    for prefix, count in (("", samples), ("late_", late)):
        fields[prefix + "ints"] = (_INTS, (3, count))  # slots, output_index, top_k
        fields[prefix + "floats"] = (_FLOATS, (3, count))  # temperature, top_p, min_p
        fields[prefix + "uniform"] = (_DOUBLES, (count,))
    fields["table"] = (_INTS, (3, updates))  # last: a plan without changes is a beginning of one with them
    places: dict[str, Place] = {}
    end = 0
    for name, (dtype, shape) in fields.items():
        words = math.prod(shape) * dtype.itemsize // 4
        places[name] = (end, words, dtype, shape)
        end += words + (words & 1)
    return end, places


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
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
class Copy:
    """Pages whose KV a step copies, all layers, before anything else that touches the pool.

    `kind`: "page" from device page to device page (a partial page that a second request will go on with); "out" from
    device page to host page; "in" from host page to device page. Within one copy no target is named twice,
    and no page is both source and target of one of kind "page".
    """

    kind: Literal["page", "out", "in"]
    source: I32  # [n]
    target: I32  # [n]


@dataclass(frozen=True)
class MoveCosts:
    """What decides between moving a request's KV to the host and back, and computing it again."""

    kv_bytes: float  # of one token, all layers
    link: float  # bytes/s between device and host, one way
    flops: float  # FLOP/s that prefill reaches
    token_flops: float  # of one token, all but its attention
    pair_flops: float  # of one (query, key) pair, all layers


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """R rows with T new tokens in all, of which K are sampled and H keep their logits for later.

    Row r computes the tokens q_start[r] .. q_start[r+1]-1, at the positions that end with kv_len[r] - 1. An id below
    zero is a future token: -slot stands for what was last sampled for that slot.

    A step does, in this order: setups, copies, changes of the page table, late sampling, forward, sampling. Late
    sampling picks from the logits that an earlier step kept for its slots, under `late_masks` (bit v of a row, in words
    of 32 bits, allows id v), and what it picks is a future token for this step's own forward. Steps run in order.
    """

    step: int  # launches count from 1
    buffer: PlanBuffer
    slots: I32  # [R]
    index: Slots  # [R], the same, for the host
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
    chunks: int  # the last so many of the rows compute prompt chunks
    setups: tuple[SlotSetup, ...] = ()
    copies: tuple[Copy, ...] = ()  # carried out in this order
    logprobs: tuple[LogprobRow, ...] = ()  # of those that are sampled, then of prompts
    late_logprobs: tuple[LogprobRow, ...] = ()  # of those that are sampled late

    @property
    def max_q_len(self) -> int:
        """The most tokens that a row has; worked out where it is asked for, on the device's thread."""
        return int(np.diff(self.q_start).max()) if self.chunks else 1

    @property
    def max_kv_len(self) -> int:
        return int(self.kv_len.max()) if len(self.kv_len) else 0


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
    host_pages: int = 0  # pages of host memory for swapped-out KV, numbered from 1
    costs: MoveCosts | None = None  # None: not known
    hidden_size: int = 0  # of an embedding; 0: there are none
