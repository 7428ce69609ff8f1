"""The toy model: a test double that notices every misplaced page, placeholder and slot, and needs no weights.

Its "KV" of a position is a hash of (id, position), kept in the paged pool. Its next token is a hash of the whole
history's entries, read back through the page table. So its output is a pure function of the prompt and the knobs
(`toy_output`), and one wrong entry changes every later token.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gapless.runtime.core.errors import ConfigError
from gapless.runtime.core.logprobs import LogprobRow, Logprobs
from gapless.runtime.core.plan import F32, I32, Copy, Plan
from gapless.runtime.core.random import mix

U64 = NDArray[np.uint64]
Ids = NDArray[np.int64]
ENTRY_BYTES = np.dtype(np.uint64).itemsize  # of one token in the pool
EMBEDDING_SIZE = 8


@dataclass(frozen=True)
class ToyKnobs:
    """Set by `--toy KEY=VALUE,...`."""

    delay_ms: float = 0.0  # how long a step takes
    late_reads: bool = False  # read the step's inputs only after the delay
    raise_at_step: int = 0  # the step, from 1, that fails; 0: none
    eos_at: int = 0  # the position of the output, from 1, at which EOS comes; 0: as the hash has it
    script: str = ""  # a file of ids, by white space, to emit by position of the output, over and over
    vocab_size: int = 512
    eos: int = 256
    seed: int = 0  # other seeds are other models
    host_pages: int = 0  # the most pages of host memory, where pages are swapped; 0: as many as the pool has

    @classmethod
    def parse(cls, text: str) -> ToyKnobs:
        """Raises ConfigError naming the knob."""
        kinds: dict[str, type] = {f.name: type(f.default) for f in fields(cls)}
        values: dict[str, bool | int | float | str] = {}
        for item in filter(None, text.split(",")):
            name, _, value = item.partition("=")
            if name not in kinds:
                raise ConfigError(f"--toy: unknown knob {name!r}; known are {', '.join(kinds)}", param="toy")
            try:
                values[name] = bool(int(value)) if kinds[name] is bool else kinds[name](value)
            except ValueError:
                raise ConfigError(f"--toy: {name} cannot be {value!r}", param="toy") from None
        return cls(**values)  # type: ignore[arg-type]


class ToyModel:
    """Runs plans with numpy. `pages` are numbered from 1; `slots` likewise."""

    def __init__(
        self,
        knobs: ToyKnobs,
        pages: int,
        page_size: int,
        slots: int,
        pages_per_request: int,
        host_pages: int = 0,
    ) -> None:
        self.knobs = knobs
        self._page_size = page_size
        self._pool: U64 = np.zeros((pages + 1) * page_size, np.uint64)
        device, host = self._pool.reshape(-1, page_size), np.zeros((host_pages + 1, page_size), np.uint64)
        self._ends = {"page": (device, device), "out": (device, host), "in": (host, device)}
        self._table = np.full((slots + 1, pages_per_request), -1, np.int32)
        self._future = np.full(slots + 1, -1, np.int64)
        self._kept = np.zeros((slots + 1, 1), np.uint64)  # histories that wait for late sampling
        self._script = _read_script(knobs.script)
        self.found: list[Logprobs] = []  # what the last part of a step was asked for
        self.forwards = 0

    def entries(self, places: NDArray[np.int64]) -> U64:
        """What the pool holds at places (page * page_size + offset), for tests."""
        return self._pool[places]

    def sample_late(self, plan: Plan) -> Ids:
        """Copies pages, applies the page-table changes, then gives ids for plan.late from histories that were kept."""
        knobs = self.knobs
        if knobs.late_reads and knobs.delay_ms:
            time.sleep(knobs.delay_ms / 1000)
        for copy in plan.copies:
            self._carry_out(copy)
        self._table[plan.table[0], plan.table[1]] = plan.table[2]
        rows = zip(plan.late.slots.tolist(), plan.late.output_index.tolist(), plan.late_masks, strict=True)
        sampled = [_allowed(self._choose(self._kept[slot], index), mask) for slot, index, mask in rows]
        self._future[plan.late.slots] = sampled
        slots = plan.late.slots
        self.found = [
            self._score(row, self._kept[slots[row.at]], sampled[row.at : row.at + 1])
            for row in plan.late_logprobs
        ]
        return np.array(sampled, np.int64)

    def run(self, plan: Plan) -> Ids:
        """The sampled ids, one for each of plan.sample_rows."""
        knobs = self.knobs
        ids = np.where(plan.ids < 0, self._future[-np.minimum(plan.ids, 0)], plan.ids)
        assert (ids >= 0).all(), "a future token was read before it was sampled"
        self._pool[plan.out_loc] = toy_entries(ids, plan.positions)
        for row in plan.held_rows.tolist():
            self._kept[plan.slots[row]] = self._history(plan, row)
        rows = zip(plan.sample_rows.tolist(), plan.sampling.output_index.tolist(), strict=True)
        sampled = np.array([self._choose(self._history(plan, row), index) for row, index in rows], np.int64)
        self._future[plan.sampling.slots] = sampled
        self.found = [
            self._embed(plan, row) if row.embeds else self._score(row, *self._asked(plan, row, sampled))
            for row in plan.logprobs
        ]
        if knobs.delay_ms and not knobs.late_reads:
            time.sleep(knobs.delay_ms / 1000)
        self.forwards += 1
        if self.forwards == knobs.raise_at_step:
            raise RuntimeError(f"the toy model was told to fail at step {self.forwards}")
        return sampled

    def _carry_out(self, copy: Copy) -> None:
        source, target = self._ends[copy.kind]
        assert copy.source.min(initial=1) > 0 and copy.target.min(initial=1) > 0, "pages count from 1"
        assert len(np.unique(copy.target)) == len(copy.target), "a copy has one target twice"
        if source is target:
            assert not np.isin(copy.source, copy.target).any(), "a copy reads a page that it writes"
        target[copy.target] = source[copy.source]

    def _history(self, plan: Plan, row: int) -> U64:
        """What stands for the row's logits: the sum of its entries. [1]"""
        history: U64 = self._entries(plan, row).sum(dtype=np.uint64, keepdims=True)
        return history

    def _entries(self, plan: Plan, row: int) -> U64:
        """The row's entries, read through the page table."""
        length = int(plan.kv_len[row])
        pages = self._table[plan.slots[row], : -(-length // self._page_size)].astype(np.int64)
        assert (pages > 0).all(), "the page table was read where nothing was written"
        places = (pages[:, None] * self._page_size + np.arange(self._page_size)).ravel()[:length]
        entries: U64 = self._pool[places]
        return entries

    def _asked(self, plan: Plan, row: LogprobRow, sampled: Ids) -> tuple[U64, Ids | I32]:
        """The histories that stand for the logits, and the ids that follow them."""
        if row.ids is None:
            return self._history(plan, plan.sample_rows[row.at]), sampled[row.at : row.at + 1]
        histories = self._entries(plan, _row_at(plan, row.at)).cumsum(dtype=np.uint64)
        return histories[plan.positions[row.at : row.at + row.count]], row.ids

    def _embed(self, plan: Plan, row: LogprobRow) -> Logprobs:
        """Made-up numbers, from what was computed up to the place."""
        index = _row_at(plan, row.at)
        assert row.at == plan.q_start[index + 1] - 1, "an embedding is of a chunk's last token"
        return Logprobs(b"", b"", b"", b"", toy_embedding(self.knobs, self._history(plan, index)).tobytes())

    def _score(self, row: LogprobRow, histories: U64, ids: Ids | I32 | list[int]) -> Logprobs:
        found = toy_logprobs(self.knobs, histories)
        best = np.argsort(-found, axis=1, kind="stable")[:, : row.top]
        return Logprobs(
            np.take_along_axis(found, np.asarray(ids)[:, None], axis=1).tobytes(),
            best.astype(np.int32).tobytes(),
            np.take_along_axis(found, best, axis=1).tobytes(),
            found[:, row.chosen].tobytes(),
        )

    def _choose(self, history: U64, output_index: int) -> int:
        return _choose(self.knobs, self._script, history, output_index)


def toy_output(
    knobs: ToyKnobs, prompt: Sequence[int], count: int, mask_after: Callable[[list[int]], I32] | None = None
) -> list[int]:
    """The first `count` ids that the toy model emits after `prompt`, EOS not heeded: the closed form for tests.

    `mask_after(output so far)` gives the mask for the next id, where the output is constrained.
    """
    script = _read_script(knobs.script)
    history = toy_entries(np.asarray(prompt, np.int64), np.arange(len(prompt))).sum(
        dtype=np.uint64, keepdims=True
    )
    output: list[int] = []
    for index in range(count):
        choice = _choose(knobs, script, history, index)
        output.append(choice if mask_after is None else _allowed(choice, mask_after(output)))
        history = history + toy_entries(np.array([output[-1]]), np.array([len(prompt) + index]))
    return output


def _choose(knobs: ToyKnobs, script: list[int], history: U64, output_index: int) -> int:
    if knobs.eos_at and output_index == knobs.eos_at - 1:
        return knobs.eos
    if script:
        return script[output_index % len(script)]
    choice = int(mix(history ^ np.uint64(knobs.seed))[0] % np.uint64(knobs.vocab_size))
    never_eos = knobs.eos_at and choice == knobs.eos
    return (choice + 1) % knobs.vocab_size if never_eos else choice


def _allowed(choice: int, mask: I32) -> int:
    """The first id at or after `choice` that the mask allows, going round."""
    bits = np.unpackbits(np.ascontiguousarray(mask).view(np.uint8), bitorder="little").nonzero()[0]
    return int(bits[np.searchsorted(bits, choice) % len(bits)])


def toy_logprobs(knobs: ToyKnobs, histories: U64) -> F32:
    """Made-up log probabilities of each id after each of N histories (sums of `toy_entries`): [N, V], many equal."""
    keys = mix(histories ^ np.uint64(knobs.seed))[:, None] ^ mix(np.arange(knobs.vocab_size, dtype=np.uint64))
    values: F32 = (mix(keys) % np.uint64(1000)).astype(np.float32) / np.float32(-100)
    return values


def toy_embedding(knobs: ToyKnobs, history: U64) -> F32:
    """Made-up numbers from -1 to 1 for a history [1]: [EMBEDDING_SIZE], not all 0."""
    keys = mix(history ^ np.uint64(knobs.seed)) ^ mix(np.arange(EMBEDDING_SIZE, dtype=np.uint64))
    values: F32 = (mix(keys) % np.uint64(2000)).astype(np.float32) / np.float32(1000) - np.float32(1)
    return values


def _row_at(plan: Plan, place: int) -> int:
    """The row whose token is at this place among the step's tokens."""
    return int(np.searchsorted(plan.q_start, place, "right")) - 1


def toy_entries(ids: NDArray[np.int64], positions: NDArray[np.integer[Any]]) -> U64:
    return mix(mix(ids.astype(np.uint64)) ^ positions.astype(np.uint64))


def _read_script(path: str) -> list[int]:
    if not path:
        return []
    try:
        ids = [int(word) for word in Path(path).read_text().split()]
    except (OSError, ValueError) as error:
        raise ConfigError(f"--toy: script {path}: {error}", param="toy") from error
    if not ids:
        raise ConfigError(f"--toy: script {path} holds no ids", param="toy")
    return ids
