"""Plans made by hand, for devices without a scheduler: every row is sampled, greedily."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gapless.runtime.core.plan import Copy, Plan, PlanBuffer, Sampling


@dataclass(frozen=True)
class Row:
    slot: int
    ids: Sequence[int]  # of the new tokens; -slot is that slot's future token
    start: int  # position of the first
    pages: Sequence[int]  # all that the row has


def copy(kind: str, moves: dict[int, int]) -> Copy:
    """From each key to its value."""
    source, target = (np.array(list(pages), np.int32) for pages in (moves, moves.values()))
    return Copy(kind, source, target)  # type: ignore[arg-type]


def hand_plan(step: int, rows: Sequence[Row], page_size: int, copies: Sequence[Copy] = ()) -> Plan:
    """The plan writes the page table of all its rows."""
    count = len(rows)
    table = [(row.slot, column, page) for row in rows for column, page in enumerate(row.pages)]
    buffer = PlanBuffer(count, sum(len(row.ids) for row in rows), len(table), count, 0, 0, 0)
    buffer["slots"][:] = [row.slot for row in rows]
    buffer["q_start"][:] = np.cumsum([0, *(len(row.ids) for row in rows)])
    buffer["kv_len"][:] = [row.start + len(row.ids) for row in rows]
    positions = [row.start + i for row in rows for i in range(len(row.ids))]
    pages = [row.pages[(row.start + i) // page_size] for row in rows for i in range(len(row.ids))]
    ids, where, out_loc = buffer["tokens"]
    ids[:] = [token for row in rows for token in row.ids]
    where[:] = positions
    out_loc[:] = np.array(pages, np.int32) * page_size + where % page_size
    buffer["table"][:] = np.array(table, np.int32).reshape(-1, 3).T
    buffer["sample_rows"][:] = np.arange(count)
    sampling, late = _greedy(buffer, "", count), _greedy(buffer, "late_", 0)
    buffer["ints"][0] = buffer["slots"]
    return Plan(
        step=step,
        buffer=buffer,
        slots=buffer["slots"],
        index=buffer["slots"].astype(np.intp),
        generations=np.zeros(count, np.int32),
        q_start=buffer["q_start"],
        kv_len=buffer["kv_len"],
        ids=ids,
        positions=where,
        out_loc=out_loc,
        table=buffer["table"],
        sample_rows=buffer["sample_rows"],
        sampling=sampling,
        held_rows=buffer["held_rows"],
        late=late,
        late_generations=np.zeros(0, np.int32),
        late_masks=buffer["late_masks"],
        chunks=count,
        copies=tuple(copies),
    )


def _greedy(buffer: PlanBuffer, prefix: str, count: int) -> Sampling:
    ints, floats, uniform = buffer[prefix + "ints"], buffer[prefix + "floats"], buffer[prefix + "uniform"]
    ints[:], floats[:], uniform[:] = np.full((3, count), -1), 0, 0
    return Sampling(
        slots=ints[0],
        output_index=ints[1],
        top_k=ints[2],
        temperature=floats[0],
        top_p=floats[1],
        min_p=floats[2],
        uniform=uniform,
        all_greedy=True,
    )
