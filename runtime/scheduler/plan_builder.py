"""Turns a composition into the arrays of a plan, and moves the launched lengths forward."""

from __future__ import annotations

import numpy as np

from gapless.runtime.core.plan import I32, Plan
from gapless.runtime.core.random import uniform
from gapless.runtime.scheduler.batch import Batch


def build_plan(batch: Batch, decode: I32, chunks: list[tuple[int, int]]) -> Plan:
    """Rows are the decoding slots (one token each), then the chunks; see Plan for the fields."""
    rows, size = batch.rows, batch.cache.page_size
    slots = np.concatenate([decode, np.array([slot for slot, _ in chunks], np.int32)])
    counts = np.ones(len(slots), np.int32)
    counts[len(decode) :] = [count for _, count in chunks]
    q_start = np.zeros(len(slots) + 1, np.int32)
    np.cumsum(counts, out=q_start[1:])
    begin = rows.launched_len[slots]
    end = begin + counts

    token_slots = np.repeat(slots, counts)
    positions = np.arange(q_start[-1], dtype=np.int32) - np.repeat(q_start[:-1] - begin, counts)
    decided = rows.prompt_len[token_slots] + rows.output_len[token_slots]
    ids = np.where(positions < decided, rows.tokens[token_slots, positions], -token_slots)
    out_loc = rows.page_table[token_slots, positions // size] * size + positions % size

    # A chunk that is not the last samples nothing; nor does a request for no tokens at all.
    samples = (end >= rows.target_len[slots]) & (rows.launched_out[slots] < rows.max_output[slots])
    sample_rows = np.flatnonzero(samples).astype(np.int32)
    sampled = slots[sample_rows]
    output_index = rows.launched_out[sampled]
    temperature = rows.temperature[sampled]
    all_greedy = not temperature.any()

    rows.launched_len[slots] = end
    rows.launched_out[sampled] += 1
    rows.in_flight[slots] += 1
    batch.launched_step += 1
    table_slots, table_columns, table_pages = batch.take_updates()
    return Plan(
        step=batch.launched_step,
        slots=slots,
        generations=rows.generation[slots],
        q_start=q_start,
        kv_len=end,
        ids=ids.astype(np.int32, copy=False),
        positions=positions,
        out_loc=out_loc,
        table_slots=table_slots,
        table_columns=table_columns,
        table_pages=table_pages,
        sample_rows=sample_rows,
        output_index=output_index,
        all_greedy=all_greedy,
        temperature=temperature,
        top_k=rows.top_k[sampled],
        top_p=rows.top_p[sampled],
        min_p=rows.min_p[sampled],
        uniform=uniform(rows.seed[sampled], output_index),
        max_q_len=int(counts.max()),
        max_kv_len=int(end.max()),
    )
