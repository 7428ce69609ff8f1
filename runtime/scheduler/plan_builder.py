"""Turns a composition into a plan, and moves the launched lengths forward."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from gapless.runtime.core.plan import I32, Plan, PlanBuffer, Sampling, SlotSetup
from gapless.runtime.core.random import uniform
from gapless.runtime.scheduler.batch import Batch
from gapless.runtime.scheduler.rows import Rows

NONE: I32 = np.empty(0, np.int32)
NO_MASKS: I32 = np.empty((0, 0), np.int32)


class Composition(NamedTuple):
    """What one step computes."""

    decode: I32  # slots that compute one token each
    chunks: list[tuple[int, int]]  # slot and number of prompt tokens
    late: I32 = NONE  # slots whose kept logits are sampled from first
    late_masks: I32 = NO_MASKS
    setups: tuple[SlotSetup, ...] = ()

    @property
    def is_empty(self) -> bool:
        return not (self.decode.size or self.chunks or self.late.size)


def build_plan(batch: Batch, what: Composition) -> Plan:
    """Rows are the decoding slots, then the chunks; see Plan for the fields."""
    rows, decode, late = batch.rows, what.decode, what.late
    slots, counts = decode, None
    if what.chunks:
        slots = np.concatenate([decode, np.array([slot for slot, _ in what.chunks], np.int32)])
        counts = np.ones(len(slots), np.int32)
        counts[len(decode) :] = [count for _, count in what.chunks]
    tokens = len(slots) if counts is None else int(counts.sum())
    begin = rows.launched_len[slots]
    end = begin + (1 if counts is None else counts)

    # A chunk that is not the last samples nothing; nor does a request for no tokens at all.
    complete = (end >= rows.target_len[slots]) & (rows.launched_out[slots] < rows.max_output[slots])
    constrained = rows.constrained[slots]
    sample_rows = (complete & ~constrained).nonzero()[0]
    held_rows = (complete & constrained).nonzero()[0] if constrained.any() else NONE
    table = batch.take_updates()

    buffer = PlanBuffer(
        {
            "slots": ("i4", (len(slots),)),
            "q_start": ("i4", (len(slots) + 1,)),
            "kv_len": ("i4", (len(slots),)),
            "tokens": ("i4", (3, tokens)),
            "table": ("i4", table.shape),
            "sample_rows": ("i4", sample_rows.shape),
            **_sampling_fields("", len(sample_rows)),
            "held_rows": ("i4", held_rows.shape),
            **_sampling_fields("late_", len(late)),
            "late_masks": ("i4", what.late_masks.shape),
        }
    )
    buffer["slots"][:], buffer["kv_len"][:], buffer["table"][:] = slots, end, table
    buffer["sample_rows"][:], buffer["held_rows"][:] = sample_rows, held_rows
    buffer["late_masks"][:] = what.late_masks
    q_start, (ids, positions, out_loc) = buffer["q_start"], buffer["tokens"]
    _fill_tokens(batch, slots, counts, begin, q_start, ids, positions, out_loc)
    sampling = _fill_sampling(buffer, "", rows, slots[sample_rows], rows.launched_out[slots[sample_rows]])
    late_sampling = _fill_sampling(buffer, "late_", rows, late, rows.launched_out[late] - 1)

    rows.launched_len[slots] = end
    rows.launched_out[sampling.slots] += 1
    rows.kept[slots[held_rows]] = True
    rows.in_flight[slots] += 1
    batch.launched_step += 1
    return Plan(
        step=batch.launched_step,
        buffer=buffer,
        slots=buffer["slots"],
        generations=rows.generation[slots],
        q_start=q_start,
        kv_len=buffer["kv_len"],
        ids=ids,
        positions=positions,
        out_loc=out_loc,
        table=buffer["table"],
        sample_rows=buffer["sample_rows"],
        sampling=sampling,
        held_rows=buffer["held_rows"],
        late=late_sampling,
        late_generations=rows.generation[late],
        late_masks=buffer["late_masks"],
        max_q_len=1 if counts is None else int(counts.max()),
        max_kv_len=int(end.max()) if len(slots) else 0,
        setups=what.setups,
    )


def _fill_tokens(
    batch: Batch,
    slots: I32,
    counts: I32 | None,
    begin: I32,
    q_start: I32,
    ids: I32,
    positions: I32,
    out_loc: I32,
) -> None:
    """Where the tokens are, what they are (or whose future token), and where their KV goes."""
    rows, size = batch.rows, batch.cache.page_size
    if counts is None:
        q_start[:] = np.arange(len(slots) + 1)
        positions[:] = begin
    else:
        q_start[0] = 0
        np.cumsum(counts, out=q_start[1:])
        positions[:] = np.arange(len(positions)) - np.repeat(q_start[:-1] - begin, counts)
        slots = np.repeat(slots, counts)
    known = positions < rows.known_len[slots]
    ids[:] = np.where(known, rows.tokens[slots, positions], -slots)
    columns = positions // size
    out_loc[:] = rows.page_table[slots, columns] * size + (positions - columns * size)


def _sampling_fields(prefix: str, count: int) -> dict[str, tuple[str, tuple[int, ...]]]:
    return {
        prefix + "ints": ("i4", (3, count)),
        prefix + "floats": ("f4", (3, count)),
        prefix + "uniform": ("f8", (count,)),
    }


def _fill_sampling(buffer: PlanBuffer, prefix: str, rows: Rows, slots: I32, output_index: I32) -> Sampling:
    ints, floats, numbers = (buffer[prefix + name] for name in ("ints", "floats", "uniform"))
    ints[0], ints[1], ints[2] = slots, output_index, rows.top_k[slots]
    np.take(rows.sampling, slots, axis=1, out=floats, mode="clip")  # the mode that writes straight into `out`
    all_greedy = not floats[0].any()
    if not all_greedy:
        numbers[:] = uniform(rows.seed[slots], output_index)
    return Sampling(
        slots=ints[0],
        output_index=ints[1],
        top_k=ints[2],
        temperature=floats[0],
        top_p=floats[1],
        min_p=floats[2],
        uniform=numbers,
        all_greedy=all_greedy,
        adjusted=tuple(rows.adjusted[slots].nonzero()[0].tolist()),
    )
