"""Decides what the next step computes: decode rows, then prompt chunks within the token budget (Sarathi-Serve)."""

from __future__ import annotations

import time

import numpy as np
from numpy.typing import NDArray

from gapless.radix_cache.cache import PrefixCache
from gapless.runtime.core.config import ServerConfig
from gapless.runtime.core.plan import I32, Slots
from gapless.runtime.scheduler.admission import Admission
from gapless.runtime.scheduler.batch import Batch
from gapless.runtime.scheduler.composition import NO_MASKS, NONE, Composition
from gapless.runtime.scheduler.request import Request
from gapless.runtime.scheduler.reserve import Reserve
from gapless.runtime.scheduler.rows import (
    CONSTRAINED,
    ENDING,
    FULL,
    IN_FLIGHT,
    KEPT,
    KNOWN_LEN,
    LAUNCHED_LEN,
    LAUNCHED_OUT,
    MAX_OUTPUT,
    OUTPUT_LEN,
    PAGE_END,
    PREEMPTED,
    PREFILLING,
    SITS_OUT,
)

MASK_WAIT_S = 0.005
IDLE_MASK_WAIT_S = 0.05
AMPLE = 4  # pages for each running row that make it right to take some before they are needed
Chunk = tuple[int, int]  # slot, number of tokens


class Composer:
    def __init__(self, config: ServerConfig, batch: Batch, admission: Admission, reserve: Reserve) -> None:
        self.batch = batch
        self.admission = admission
        self.failed: list[tuple[Request, Exception]] = []  # whose grammar raised, since the last look
        # The array of decoding rows (the same object means the same rows) that need no page for so many steps.
        self._with_pages: Slots = NONE
        self._steps_with_pages = 0
        self._reserve = reserve
        self._step_tokens = config.max_num_batched_tokens
        self._chunk_tokens = config.chunked_prefill_size

    @property
    def cache(self) -> PrefixCache:
        return self.batch.cache

    def compose(self) -> Composition:
        """The next step, whose pages are all allocated; nothing in it when there is nothing to do."""
        flags, seen = self._flags()
        late, masks = NONE, NO_MASKS
        if seen & KEPT:
            late, masks = self._sample_late()
            flags, seen = self._flags()
        decode = self._decode(flags, seen, SITS_OUT)
        budget = self._step_tokens - len(decode)
        chunks = self._continue_prefills(budget) if seen & PREFILLING else []
        chunks += self._admit(budget - sum(count for _, count in chunks))
        self._reserve.stepped()
        if not self.admission.setups:
            return Composition(decode, chunks, seen, late, masks)
        setups, self.admission.setups = tuple(self.admission.setups), []
        return Composition(decode, chunks, seen, late, masks, setups)

    def compose_more(self) -> Composition:
        """A further step of the same composition: nobody is admitted, and constrained rows sit out."""
        flags, seen = self._flags()
        decode = self._decode(flags, seen, SITS_OUT | CONSTRAINED)
        return Composition(decode, self._continue_prefills(self._step_tokens - len(decode)), seen)

    def _flags(self) -> tuple[NDArray[np.uint8], int]:
        """The flags of the running rows, and all that are set in any of them."""
        flags = self.batch.rows.flags[self.batch.running]
        return flags, int(np.bitwise_or.reduce(flags))

    def _sample_late(self) -> tuple[Slots, I32]:
        """Constrained rows whose logits wait and whose tokens are all decided, and their masks."""
        rows, running = self.batch.rows, self.batch.running
        kept = running[rows.flags[running] & (KEPT | ENDING | PREEMPTED) == KEPT]
        slots, masks = [], []
        deadline = time.monotonic() + self._patience(kept)
        for slot in kept[rows.launched_out[kept] == rows.output_len[kept]].tolist():
            request = self.batch.request(slot)
            assert request.grammar is not None
            try:
                mask = request.grammar.mask(max(deadline - time.monotonic(), 0.0))
            except Exception as error:  # its own fault ends its own request
                self.failed.append((request, error))
                continue
            if mask is not None:
                masks.append(mask)
                slots.append(slot)
        if not slots:
            return NONE, NO_MASKS
        late = np.array(slots, np.intp)
        rows.flags[late] &= ~KEPT & 255
        rows.state[LAUNCHED_OUT : IN_FLIGHT + 1, late] += 1
        rows.flags[late[rows.launched_out[late] >= rows.max_output[late]]] |= FULL
        return late, np.stack(masks)

    def _patience(self, kept: Slots) -> float:
        """Seconds that a step waits for masks: long only where it would be empty without them."""
        others = self.batch.running.size > kept.size or self.batch.retired_step < self.batch.launched_step
        return MASK_WAIT_S if others else IDLE_MASK_WAIT_S

    def _decode(self, flags: NDArray[np.uint8], seen: int, but: int) -> Slots:
        """Rows with none of the flags `but`, oldest first, that have a page for one more token."""
        rows, running = self.batch.rows, self.batch.running
        slots = running[flags & but == 0] if seen & but else running
        if slots is self._with_pages and self._steps_with_pages:
            self._steps_with_pages -= 1
            return slots
        if not slots.size:
            return slots
        left = rows.page_end[slots] - rows.launched_len[slots]
        least = int(left.min())
        if least > 0:
            self._with_pages, self._steps_with_pages = slots, least - 1
            return slots
        needy = slots[left <= 0]
        if self.cache.available > AMPLE * running.size:
            self.batch.grow(self._near_page_end(slots))
            return slots
        self.batch.groups.missing(needy.size)
        served = needy[: self.cache.available]
        self.batch.grow(served)
        if served.size == needy.size:
            return slots
        self.admission.relieve()
        without = np.concatenate([needy[served.size :], running[rows.flags[running] & PREEMPTED > 0]])
        return slots[~np.isin(slots, without)]

    def _near_page_end(self, slots: Slots) -> Slots:
        """Rows that soon need a page, so that most steps take none: half a page ahead of those that need one now."""
        rows = self.batch.rows
        state = rows.state.take(slots, axis=1)
        ahead = state[LAUNCHED_LEN] + self.cache.page_size // 2 >= state[PAGE_END]
        # No page beyond the last token that the request may still compute.
        ahead &= state[PAGE_END] < state[KNOWN_LEN] + state[MAX_OUTPUT] - state[OUTPUT_LEN]
        near: Slots = slots[ahead]
        return near

    def _continue_prefills(self, budget: int) -> list[Chunk]:
        """The next chunks of prompts that have begun, oldest first."""
        rows, running = self.batch.rows, self.batch.running
        chunks: list[Chunk] = []
        for slot in running[rows.flags[running] & (PREFILLING | ENDING | PREEMPTED) == PREFILLING].tolist():
            if budget <= 0:
                break
            chunks.append((slot, self._chunk(slot, budget)))
            budget -= chunks[-1][1]
        return chunks

    def _chunk(self, slot: int, budget: int) -> int:
        rows = self.batch.rows
        return min(int(rows.target_len[slot] - rows.launched_len[slot]), self._chunk_tokens, budget)

    def _admit(self, budget: int) -> list[Chunk]:
        """First chunks of requests that join."""
        chunks: list[Chunk] = []
        if budget > 0:
            for request in self.admission.admit():
                chunks.append((request.slot, self._chunk(request.slot, budget)))
                budget -= chunks[-1][1]
                if budget <= 0:
                    break
        return chunks
