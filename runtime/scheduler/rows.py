"""The state of the running requests as arrays, one row a slot; row 0 is padding.

Lengths, each with one meaning:

    computed_len   positions whose KV a retired step has written
    launched_len   positions computed or in flight
    allocated      pages owned; covers launched_len
    output_len     output tokens decided; the newest of them has no KV yet
    known_len      prompt_len + output_len, the tokens that have ids
    launched_out   output tokens decided or in flight
    target_len     tokens known when the row was last admitted: it prefills until launched_len reaches it

A row prefills while launched_len < target_len and decodes after that; then its next input is token
launched_len = prompt_len + launched_out - 1, which is in flight where launched_out > output_len.

A constrained row (one with a grammar) keeps its logits on the device after its forward; when all its tokens are decided
and its mask is there, a later step samples from them.
"""

from __future__ import annotations

import numpy as np

from gapless.runtime.core.messages import Submit, int32s
from gapless.runtime.core.plan import I32


class Rows:
    def __init__(self, slots: int, context_length: int, page_size: int) -> None:
        rows = slots + 1
        self.tokens = np.zeros((rows, context_length), np.int32)  # prompt, then decided output
        self.page_table = np.zeros((rows, -(-context_length // page_size)), np.int32)
        self.prompt_len = np.zeros(rows, np.int32)
        self.computed_len = np.zeros(rows, np.int32)
        self.launched_len = np.zeros(rows, np.int32)
        self.allocated = np.zeros(rows, np.int32)
        self.output_len = np.zeros(rows, np.int32)
        self.known_len = np.zeros(rows, np.int32)
        self.launched_out = np.zeros(rows, np.int32)
        self.target_len = np.zeros(rows, np.int32)
        self.max_output = np.zeros(rows, np.int32)
        self.in_flight = np.zeros(rows, np.int32)  # launched steps that name the row and have not retired
        self.generation = np.zeros(rows, np.int32)  # counts the requests that had the slot
        self.ending = np.zeros(
            rows, bool
        )  # finished or aborted: sits out, released when nothing is in flight
        self.preempted = np.zeros(rows, bool)  # sits out; gives its pages back when nothing is in flight
        self.arrival = np.zeros(rows, np.int64)  # order of coming of the slot's request
        self.constrained = np.zeros(rows, bool)
        self.kept = np.zeros(rows, bool)  # constrained, and its logits wait to be sampled from
        self.adjusted = np.zeros(
            rows, bool
        )  # the sampler changes its logits: penalties, bias, min_new_tokens
        self.stop_ids = np.full((rows, 4), -1, np.int32)
        self.sampling = np.zeros((3, rows), np.float32)  # temperature (0: greedy), top_p, min_p
        self.top_k = np.zeros(rows, np.int32)
        self.seed = np.zeros(rows, np.int64)
        self._free = list(range(slots, 0, -1))

    @property
    def free_slots(self) -> int:
        return len(self._free)

    def open(self, request: Submit, max_output: int, *, constrained: bool) -> int:
        """Gives the request a slot and fills its row; its lengths are zero."""
        slot = self._free.pop()
        ids, params = int32s(request.input_ids), request.params
        self.tokens[slot, : len(ids)] = ids
        self.prompt_len[slot] = self.known_len[slot] = len(ids)
        self.max_output[slot] = max_output
        self.output_len[slot] = self.launched_out[slot] = 0
        self.ending[slot] = self.preempted[slot] = self.kept[slot] = False
        self.constrained[slot], self.adjusted[slot] = constrained, params.adjusts_logits
        self._set_stop_ids(slot, request.stop_ids)
        self.sampling[:, slot] = 0.0 if params.greedy else params.temperature, params.top_p, params.min_p
        self.top_k[slot] = params.top_k
        self.seed[slot] = request.seed
        return slot

    def close(self, slot: int) -> None:
        """Frees the slot; whatever still arrives for its generation is void."""
        assert self.in_flight[slot] == 0, "a slot named by a launched step was freed"
        self.generation[slot] += 1
        self._free.append(slot)

    def known(self, slot: int) -> I32:
        """The row's decided tokens: prompt and output."""
        return self.tokens[slot, : self.known_len[slot]]

    def append(self, slots: I32, ids: I32) -> None:
        """Each of `slots` gains one decided token."""
        self.tokens[slots, self.known_len[slots]] = ids
        self.known_len[slots] += 1
        self.output_len[slots] += 1

    def truncate(self, slot: int, output_len: int) -> None:
        """Takes back the decided tokens after the first `output_len`."""
        self.output_len[slot] = min(int(self.output_len[slot]), output_len)
        self.known_len[slot] = self.prompt_len[slot] + self.output_len[slot]

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
