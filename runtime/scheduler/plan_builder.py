"""Turns a composition into a plan, and moves the launched lengths forward."""

from __future__ import annotations

import numpy as np

from gapless.runtime.core.logprobs import LogprobRow
from gapless.runtime.core.plan import I32, Plan, PlanBuffer, Sampling, Slots
from gapless.runtime.core.random import uniform
from gapless.runtime.scheduler import logprobs
from gapless.runtime.scheduler.batch import Batch
from gapless.runtime.scheduler.composition import NO_INTS, Composition
from gapless.runtime.scheduler.rows import (
    ADJUSTED,
    CONSTRAINED,
    DRAWN,
    FULL,
    GENERATION,
    IN_FLIGHT,
    KEPT,
    KNOWN_LEN,
    LAUNCHED_LEN,
    LAUNCHED_OUT,
    MAX_OUTPUT,
    PREFILLING,
    TOP_K,
    Rows,
)


def build_plan(batch: Batch, what: Composition) -> Plan:
    """Rows are the decoding slots, then the chunks; see Plan for the fields."""
    rows, slots, counts = batch.rows, what.decode, None
    if what.chunks:
        slots = np.concatenate([slots, np.array([slot for slot, _ in what.chunks], np.intp)])
        counts = np.ones(len(slots), np.int32)
        counts[len(what.decode) :] = [count for _, count in what.chunks]
    tokens = len(slots) if counts is None else int(counts.sum())
    state, flags_seen = rows.state.take(slots, axis=1), what.flags_seen
    if what.chunks:
        flags_seen |= int(np.bitwise_or.reduce(rows.flags[slots]))
    sample_rows, held_rows = _rows_that_sample(rows, slots, counts, state, flags_seen)
    table = batch.take_updates()

    sizes = (table.shape[1], len(sample_rows), len(held_rows), *what.late_masks.shape)
    buffer = PlanBuffer(len(slots), tokens, *sizes)
    row_slots, kv_len, q_start = buffer["slots"], buffer["kv_len"], buffer["q_start"]
    row_slots[:] = slots
    np.add(state[LAUNCHED_LEN], 1 if counts is None else counts, out=kv_len)
    ids, positions, out_loc = places = buffer["tokens"]
    if counts is None:
        q_start[:] = rows.numbers[: len(q_start)]
        _fill_decode(rows, slots, state, places)
    else:
        _fill_mixed(rows, slots, counts, state[LAUNCHED_LEN], q_start, places)
    buffer["table"][:] = table
    buffer["sample_rows"][:] = sample_rows
    if len(held_rows):
        buffer["held_rows"][:] = held_rows
    samples_all = len(sample_rows) == len(slots)
    sampled, sampled_state = (slots, state) if samples_all else (slots[sample_rows], state[:, sample_rows])
    sampling = _fill_sampling(buffer, "", rows, sampled, sampled_state, flags_seen)
    late = _fill_late(buffer, rows, what)
    asked, asked_late = _logprobs(batch, what, sampled, state) if batch.scored else ((), ())
    _advance(rows, slots, kv_len, sampled, sampled_state, slots[held_rows])
    batch.launched_step += 1
    return Plan(
        step=batch.launched_step,
        buffer=buffer,
        slots=row_slots,
        index=slots,
        generations=state[GENERATION],
        q_start=q_start,
        kv_len=kv_len,
        ids=ids,
        positions=positions,
        out_loc=out_loc,
        table=buffer["table"],
        sample_rows=buffer["sample_rows"],
        sampling=sampling,
        held_rows=held_rows,
        late=late,
        late_generations=rows.generation[what.late] if late.slots.size else NO_INTS,
        late_masks=what.late_masks,
        chunks=len(what.chunks),
        setups=what.setups,
        copies=batch.take_copies(),
        logprobs=asked,
        late_logprobs=asked_late,
    )


def _logprobs(
    batch: Batch, what: Composition, sampled: Slots, state: I32
) -> tuple[tuple[LogprobRow, ...], tuple[LogprobRow, ...]]:
    """What the plan's rows, whose state is given, are asked for, and what those that are sampled late are."""
    decoding = len(what.decode)
    begins = state[LAUNCHED_LEN, decoding:].tolist()
    of_chunks = logprobs.of_chunks(batch, what.chunks, begins, decoding)
    of_samples = logprobs.of_samples(batch, sampled.tolist())
    return of_samples + of_chunks, logprobs.of_samples(batch, what.late.tolist())


def _advance(rows: Rows, slots: Slots, kv_len: I32, sampled: Slots, sampled_state: I32, held: Slots) -> None:
    """The rows are launched up to `kv_len`; those of `sampled` have a token more in flight, `held` wait for theirs."""
    if sampled is slots:  # as in a plain decode step: both move in one operation
        rows.state[LAUNCHED_OUT : IN_FLIGHT + 1, slots] += 1
    else:
        rows.in_flight[slots] += 1
        rows.launched_out[sampled] += 1
    rows.launched_len[slots] = kv_len
    full = sampled_state[LAUNCHED_OUT] >= sampled_state[MAX_OUTPUT] - 1
    if np.count_nonzero(full):
        rows.flags[sampled[full]] |= FULL
    if held.size:
        rows.flags[held] |= KEPT


def _rows_that_sample(
    rows: Rows, slots: Slots, counts: I32 | None, state: I32, flags_seen: int
) -> tuple[I32, I32]:
    """Indices of the rows that are sampled, and of those whose logits are kept for late sampling.

    A chunk that is not the last of its prompt samples nothing; nor does a request for no tokens at all.
    """
    if counts is None and not flags_seen & CONSTRAINED:
        return rows.numbers[: len(slots)], NO_INTS
    complete = state[LAUNCHED_LEN] + (1 if counts is None else counts) >= rows.target_len[slots]
    rows.flags[slots[complete]] &= ~PREFILLING & 255
    complete &= state[LAUNCHED_OUT] < state[MAX_OUTPUT]
    constrained = rows.flags[slots] & CONSTRAINED > 0
    sampled, held = (complete & ~constrained).nonzero()[0], (complete & constrained).nonzero()[0]
    return sampled.astype(np.int32), held.astype(np.int32)


def _fill_decode(rows: Rows, slots: Slots, state: I32, places: I32) -> None:
    """One token a row: future tokens, but where the newest is decided already."""
    ids, positions, out_loc = places
    begin = state[LAUNCHED_LEN]
    positions[:] = begin
    out_loc[:] = rows.places(slots, begin)
    ids[:] = -slots
    known = state[KNOWN_LEN] > begin
    if np.count_nonzero(known):
        ids[known] = rows.tokens[slots[known], begin[known]]


def _fill_mixed(rows: Rows, slots: Slots, counts: I32, begin: I32, q_start: I32, places: I32) -> None:
    """Where the tokens are, what they are (or whose future token), and where their KV goes."""
    ids, positions, out_loc = places
    q_start[0] = 0
    np.cumsum(counts, out=q_start[1:])
    positions[:] = rows_of_tokens = np.repeat(begin - q_start[:-1], counts)
    positions += np.arange(len(rows_of_tokens), dtype=np.int32)
    slots = np.repeat(slots, counts)
    known = positions < rows.known_len[slots]
    ids[:] = np.where(known, rows.tokens[slots, positions], -slots)
    out_loc[:] = rows.places(slots, positions)


def _fill_sampling(
    buffer: PlanBuffer, prefix: str, rows: Rows, slots: Slots, state: I32, flags_seen: int
) -> Sampling:
    """`state` is that of `slots`; `flags_seen` has the flags of all of them, and perhaps more."""
    ints, floats, numbers = buffer[prefix + "ints"], buffer[prefix + "floats"], buffer[prefix + "uniform"]
    ints[0], ints[1], ints[2] = slots, state[LAUNCHED_OUT], state[TOP_K]
    adjusted: tuple[int, ...] = ()
    if flags_seen & DRAWN:
        np.take(
            rows.sampling, slots, axis=1, out=floats, mode="clip"
        )  # the mode that writes straight to `out`
        numbers[:] = uniform(rows.seed[slots], ints[1])
    else:
        floats.fill(0)
        numbers.fill(0)
    if flags_seen & ADJUSTED:
        adjusted = tuple((rows.flags[slots] & ADJUSTED).nonzero()[0].tolist())
    return Sampling(
        slots=ints[0],
        output_index=ints[1],
        top_k=ints[2],
        temperature=floats[0],
        top_p=floats[1],
        min_p=floats[2],
        uniform=numbers,
        all_greedy=not flags_seen & DRAWN,
        adjusted=adjusted,
    )


def _fill_late(buffer: PlanBuffer, rows: Rows, what: Composition) -> Sampling:
    late = what.late
    if not late.size:
        return _NOTHING
    buffer["late_masks"][:] = what.late_masks
    state = rows.state.take(late, axis=1)
    state[LAUNCHED_OUT] -= 1  # the composer has counted the token that is sampled now
    return _fill_sampling(buffer, "late_", rows, late, state, int(np.bitwise_or.reduce(rows.flags[late])))


_FLOATS, _NUMBERS = np.empty(0, np.float32), np.empty(0, np.float64)
_NOTHING = Sampling(
    slots=NO_INTS,
    output_index=NO_INTS,
    temperature=_FLOATS,
    top_p=_FLOATS,
    min_p=_FLOATS,
    top_k=NO_INTS,
    uniform=_NUMBERS,
    all_greedy=True,
)
