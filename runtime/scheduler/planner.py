"""Makes plans, and makes the next of a run of plain decode steps from the one before.

While the same rows decode and the step before is still in flight, a plan differs from its by one in four fields:
lengths, positions, places in the pool, output indices. So its buffer is the last one plus a constant.
"""

from __future__ import annotations

import itertools
from collections import deque

import numpy as np

from gapless.runtime.core.plan import I32, Plan, PlanBuffer, Sampling, Slots
from gapless.runtime.core.random import uniform
from gapless.runtime.scheduler.batch import Batch
from gapless.runtime.scheduler.composition import NO_INTS, NONE, Composition
from gapless.runtime.scheduler.plan_builder import build_plan
from gapless.runtime.scheduler.rows import IN_FLIGHT, LAUNCHED_LEN


class Planner:
    def __init__(self, batch: Batch) -> None:
        self._batch = batch
        self._last: Plan | None = None  # the newest plan, where it only decoded
        self._decode: Slots = NONE  # its composition's array itself: the same object means the same rows
        self._difference: I32 | None = None  # between the buffers of two plans in a row, once it was needed
        # The rows that begin a page in the next step, in the one after, and so on for a page.
        self._crossings: deque[Slots] = deque()
        self._room = 0  # tokens that every one of the rows may still launch

    def build(self, what: Composition) -> Plan:
        """Moves the launched lengths forward, as `build_plan` does."""
        last = self._last
        only_decodes = not (what.chunks or what.late.size or what.setups or self._batch.has_copies)
        if last is not None and only_decodes and what.decode is self._decode and self._is_continued_by(last):
            plan = self._next(last)
        else:
            plan = build_plan(self._batch, what)
            only_decodes &= len(plan.sample_rows) == len(plan.slots)
            self._decode, self._difference = what.decode, None
        self._last = plan if only_decodes else None
        return plan

    def _is_continued_by(self, last: Plan) -> bool:
        """Whether all rows' newest tokens are in flight, and none reaches its limit with one more."""
        if self._batch.retired_step >= last.step:
            return False
        if self._difference is None:
            if (last.ids >= 0).any():
                return False
            rows = self._batch.rows
            self._difference = _difference(last)
            self._crossings = _crossings(last.positions + 1, rows.page_size)
            self._room = int((rows.max_output[last.index] - rows.launched_out[last.index]).min())
        return self._room > 1

    def _next(self, last: Plan) -> Plan:
        batch, rows, slots, difference = self._batch, self._batch.rows, last.index, self._difference
        assert difference is not None
        count, table = len(slots), batch.take_updates()
        buffer = PlanBuffer(count, count, table.shape[1], count, 0, 0, 0)
        start = len(difference)
        np.add(last.buffer.words[:start], difference, out=buffer.words[:start])
        kv_len, (_, positions, out_loc) = buffer["kv_len"], buffer["tokens"]
        if table.size:
            buffer["table"][:] = table
        crossing = self._crossings[0]  # rows whose token is the first of a page
        self._crossings.rotate(-1)
        if crossing.size:
            columns = positions[crossing] // rows.page_size
            out_loc[crossing] = rows.page_table[slots[crossing], columns] * rows.page_size
        rows.state[LAUNCHED_LEN : IN_FLIGHT + 1, slots] += 1
        batch.launched_step += 1
        self._room -= 1
        return Plan(
            step=batch.launched_step,
            buffer=buffer,
            slots=last.slots,
            index=slots,
            generations=last.generations,
            q_start=last.q_start,
            kv_len=kv_len,
            ids=last.ids,
            positions=positions,
            out_loc=out_loc,
            table=table,
            sample_rows=last.sample_rows,
            sampling=self._sampling(last.sampling, buffer),
            held_rows=NO_INTS,
            late=last.late,
            late_generations=NO_INTS,
            late_masks=last.late_masks,
            chunks=0,
            logprobs=last.logprobs,
        )

    def _sampling(self, last: Sampling, buffer: PlanBuffer) -> Sampling:
        output_index, numbers = buffer["ints"][1], last.uniform
        if not last.all_greedy:
            numbers = buffer["uniform"]
            numbers[:] = uniform(self._batch.rows.seed[last.slots], output_index)
        return Sampling(
            slots=last.slots,
            output_index=output_index,
            temperature=last.temperature,
            top_p=last.top_p,
            min_p=last.min_p,
            top_k=last.top_k,
            uniform=numbers,
            all_greedy=last.all_greedy,
            adjusted=last.adjusted,
        )


def _crossings(positions: I32, page_size: int) -> deque[Slots]:
    """For each of the next page_size steps, from that of `positions` on, the rows at the first place of a page."""
    wait = -positions % page_size
    order = np.argsort(wait, kind="stable")
    bounds = np.searchsorted(wait[order], np.arange(page_size + 1)).tolist()
    return deque(order[start:end] for start, end in itertools.pairwise(bounds))


def _difference(plan: Plan) -> I32:
    """What the buffer of the next plan has more, up to the table: one for each row in the fields that move."""
    places = plan.buffer.places
    difference = np.zeros(places["table"][0], np.int32)
    count = len(plan.slots)
    for name, first in (("kv_len", 0), ("tokens", count), ("tokens", 2 * count), ("ints", count)):
        start = places[name][0] + first
        difference[start : start + count] = 1
    return difference
