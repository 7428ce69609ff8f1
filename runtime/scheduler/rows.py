"""The state of the running requests as arrays, one row a slot; row 0 is padding.

Lengths, each with one meaning:

    computed_len   positions whose KV a retired step has written
    launched_len   positions computed or in flight
    page_end       positions that own a page; covers launched_len
    output_len     output tokens decided; the newest of them has no KV yet
    known_len      prompt_len + output_len, the tokens that have ids
    launched_out   output tokens decided or in flight
    target_len     tokens known when the row was last admitted: it prefills until launched_len reaches it

A row that no flag holds back decodes: its next input is token launched_len = prompt_len + launched_out - 1, which is
in flight where launched_out > output_len. A constrained row (one with a grammar) keeps its logits on the device after
its forward; when all its tokens are decided and its mask is there, a later step samples from them.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from gapless.runtime.core.messages import Submit, int32s
from gapless.runtime.core.plan import I32, Slots

# Rows of `Rows.state`. What moves together stands together, so that one operation moves it.
LAUNCHED_LEN: Final = 0
LAUNCHED_OUT: Final = 1
IN_FLIGHT: Final = 2
KNOWN_LEN: Final = 3
OUTPUT_LEN: Final = 4
PAGE_END: Final = 5
MAX_OUTPUT: Final = 6
GENERATION: Final = 7
TOP_K: Final = 8
_STATES: Final = 9

ENDING: Final = 1  # finished or aborted: released when nothing is in flight
PREEMPTED: Final = 2  # gives its pages back when nothing is in flight
KEPT: Final = 4  # constrained, and its logits wait to be sampled from
PREFILLING: Final = 8  # launched_len < target_len
FULL: Final = 16  # launched_out == max_output
SITS_OUT: Final = ENDING | PREEMPTED | KEPT | PREFILLING | FULL  # does not decode
CONSTRAINED: Final = 32
ADJUSTED: Final = 64  # the sampler changes its logits: penalties, bias, min_new_tokens
DRAWN: Final = 128  # its temperature is not 0


_HOTTEST = float(np.finfo(np.float32).max)


class Rows:
    def __init__(self, slots: int, context_length: int, page_size: int) -> None:
        rows = slots + 1
        self.page_size = page_size
        self.tokens = np.zeros((rows, context_length), np.int32)  # prompt, then decided output
        self.page_table = np.zeros((rows, -(-context_length // page_size)), np.int32)
        self.state = np.zeros((_STATES, rows), np.int32)
        self.launched_len = self.state[LAUNCHED_LEN]
        self.launched_out = self.state[LAUNCHED_OUT]
        self.in_flight = self.state[IN_FLIGHT]  # launched steps that name the row and have not retired
        self.known_len = self.state[KNOWN_LEN]
        self.output_len = self.state[OUTPUT_LEN]
        self.page_end = self.state[PAGE_END]
        self.max_output = self.state[MAX_OUTPUT]
        self.generation = self.state[GENERATION]  # counts the requests that had the slot
        self.top_k = self.state[TOP_K]
        self.flags = np.zeros(rows, np.uint8)
        self.prompt_len = np.zeros(rows, np.int32)
        self.computed_len = np.zeros(rows, np.int32)
        self.target_len = np.zeros(rows, np.int32)
        self.arrival = np.zeros(rows, np.int64)  # order of coming of the slot's request
        self.stop_ids = np.full((rows, 4), -1, np.int32)
        self.sampling = np.zeros((3, rows), np.float32)  # temperature (0: greedy), top_p, min_p
        self.seed = np.zeros(rows, np.int64)
        self.numbers = np.arange(rows + 1, dtype=np.int32)
        self._free = list(range(slots, 0, -1))

    @property
    def free_slots(self) -> int:
        return len(self._free)

    def has(self, slot: int, flags: int) -> bool:
        """Whether any of `flags` is set."""
        return bool(self.flags[slot] & flags)

    def open(self, request: Submit, max_output: int, *, constrained: bool) -> int:
        """Gives the request a slot and fills its row; its lengths are zero."""
        slot = self._free.pop()
        ids, params = int32s(request.input_ids), request.params
        self.tokens[slot, : len(ids)] = ids
        self.prompt_len[slot] = self.known_len[slot] = len(ids)
        self.max_output[slot] = max_output
        self.output_len[slot] = self.launched_out[slot] = 0
        flags = CONSTRAINED * constrained | ADJUSTED * params.adjusts_logits | DRAWN * (not params.greedy)
        self.flags[slot] = flags
        self._set_stop_ids(slot, request.stop_ids)
        temperature = 0.0 if params.greedy else min(params.temperature, _HOTTEST)
        self.sampling[:, slot] = temperature, params.top_p, params.min_p
        self.top_k[slot] = params.top_k
        self.seed[slot] = request.seed
        return slot

    def begin(self, slot: int, cached_len: int) -> None:
        """The row will compute all its known tokens but the first `cached_len`."""
        self.target_len[slot] = self.known_len[slot]
        self.computed_len[slot] = self.launched_len[slot] = cached_len
        self.launched_out[slot] = self.output_len[slot]
        self.page_end[slot] = 0
        self.flags[slot] &= ~(PREEMPTED | FULL) & 255
        self.flags[slot] |= PREFILLING | FULL * (self.launched_out[slot] >= self.max_output[slot])

    def close(self, slot: int) -> None:
        """Frees the slot; whatever still arrives for its generation is void."""
        assert self.in_flight[slot] == 0, "a slot named by a launched step was freed"
        self.generation[slot] += 1
        self._free.append(slot)

    def known(self, slot: int) -> I32:
        """The row's decided tokens: prompt and output."""
        return self.tokens[slot, : self.known_len[slot]]

    def append(self, slots: Slots, known_len: I32, ids: I32) -> None:
        """Each of `slots` gains one decided token; known_len is theirs."""
        self.tokens[slots, known_len] = ids
        self.state[KNOWN_LEN : OUTPUT_LEN + 1, slots] += 1

    def truncate(self, slot: int, output_len: int) -> None:
        """Takes back the decided tokens after the first `output_len`."""
        self.output_len[slot] = min(int(self.output_len[slot]), output_len)
        self.known_len[slot] = self.prompt_len[slot] + self.output_len[slot]

    def set_pages(self, slots: Slots, columns: I32, pages: I32) -> None:
        """The new pages of rows that end with the columns given; of several for one row the last is the newest."""
        self.page_table[slots, columns] = pages
        self.page_end[slots] = (columns + 1) * self.page_size

    def places(self, slots: Slots, positions: I32) -> I32:
        """Where in the pool the rows' positions lie, as page * page_size + offset."""
        columns = positions // self.page_size
        pages = self.page_table[slots, columns]
        return pages * self.page_size + (positions - columns * self.page_size)

    def cacheable_len(self, slot: int) -> int:
        """Positions whose KV is written and whose tokens are part of the request's final text."""
        output_with_kv = max(int(self.output_len[slot]) - 1, 0)
        return min(int(self.computed_len[slot]), int(self.prompt_len[slot]) + output_with_kv)

    def _set_stop_ids(self, slot: int, ids: tuple[int, ...]) -> None:
        width = self.stop_ids.shape[1]
        if len(ids) > width:
            wider = np.full((len(self.stop_ids), len(ids)), -1, np.int32)
            wider[:, :width] = self.stop_ids
            self.stop_ids = wider
        self.stop_ids[slot] = -1
        self.stop_ids[slot, : len(ids)] = ids
