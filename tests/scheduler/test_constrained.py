"""Constrained rows sample late, from the right state, and hold nobody up; with a fake grammar on the toy model."""

from __future__ import annotations

import numpy as np
import pytest
from differential import Runner
from hypothesis import given, settings
from hypothesis import strategies as st

from gapless.runtime.core.config import ServerConfig
from gapless.runtime.core.messages import Finish
from gapless.runtime.model.toy import toy_output

WORDS = 512 // 32
END = 256
PROMPT = [(11 * i) % 250 for i in range(30)]


def mask_after(output: list[int]) -> np.ndarray:
    """What may follow depends on the last token alone: one of three ids, in another place each time, or the end."""
    last = output[-1] if output else 7
    mask = np.zeros(WORDS * 32, np.uint8)
    mask[[(last * 5 + 1) % 250, (last * 3 + 50) % 250, (last + 100) % 250]] = 1
    mask[END] = last % 9 == 0
    return np.packbits(mask, bitorder="little").view(np.int32)


class FakeGrammar:
    """Raises in accept at token number `break_at`, counted from 1."""

    def __init__(self, break_at: int = 0) -> None:
        self.output: list[int] = []
        self.break_at = break_at

    def mask(self, wait_s: float) -> np.ndarray:
        return mask_after(self.output)

    def accept(self, token: int) -> None:
        assert mask_after(self.output)[token // 32] >> (token % 32) & 1, "the token was not allowed"
        self.output.append(token)
        if len(self.output) == self.break_at:
            raise ValueError("this grammar broke")


def make_grammar(submit):
    """Every second request is constrained."""
    return FakeGrammar() if submit.uid % 2 else None


def make(**options) -> Runner:
    defaults = {"model_path": "toy", "page_size": 4, "max_running_requests": 8, "context_length": 256}
    grammar = options.pop("make_grammar", make_grammar)
    return Runner(ServerConfig(**defaults | options), make_grammar=grammar)


def want(runner: Runner, uid: int, prompt: list[int], count: int) -> list[int]:
    if uid % 2 == 0:
        return runner.expected(prompt, count)
    ids = toy_output(runner.knobs, prompt, count, mask_after)
    return ids[: ids.index(END) + 1] if END in ids else ids


@settings(max_examples=150, deadline=None)
@given(
    data=st.data(),
    no_overlap=st.booleans(),
    steps=st.sampled_from([1, 4]),
    pool=st.sampled_from([96, 2048]),
    chunk=st.sampled_from([3, 64]),
    counts=st.lists(st.sampled_from([1, 2, 9, 30]), min_size=1, max_size=6),
)
def test_constrained_and_free_rows_get_their_ids_whatever_is_ready_when(
    data, no_overlap, steps, pool, chunk, counts
):
    runner = make(
        disable_overlap_schedule=no_overlap,
        num_scheduler_steps=steps,
        max_total_tokens=pool,
        chunked_prefill_size=chunk,
    )
    ready = iter(data.draw(st.lists(st.booleans(), max_size=40)))
    runner.late_ready = lambda: next(ready, True)
    prompts = {uid: PROMPT[: 3 * uid + 1] for uid in range(1, len(counts) + 1)}
    for uid, count in enumerate(counts, 1):
        stop_ids = (END,) if uid % 2 else ()
        runner.submit(uid, prompts[uid], count, stop_ids)
        for _ in range(data.draw(st.integers(0, 3))):
            runner.turn()
    aborted = data.draw(st.none() | st.sampled_from(sorted(prompts)))
    if aborted:
        runner.abort(aborted)
    runner.finish()
    for uid, count in enumerate(counts, 1):
        ids = want(runner, uid, prompts[uid], count)
        if runner.seen[uid].finish == Finish.ABORT:
            ids = ids[: len(runner.seen[uid].ids)]
        assert runner.seen[uid].ids == ids


@pytest.mark.parametrize("no_overlap", [False, True])
def test_a_grammar_that_raises_ends_its_own_request_alone(no_overlap):
    runner = make(
        disable_overlap_schedule=no_overlap,
        make_grammar=lambda submit: FakeGrammar(break_at=4) if submit.uid == 1 else make_grammar(submit),
    )
    for uid in (1, 2, 3):
        runner.submit(uid, PROMPT, 12)
    runner.finish()
    assert runner.seen[1].finish == Finish.FAILED
    assert "this grammar broke" in runner.seen[1].message
    for uid in (2, 3):
        assert runner.seen[uid].ids == want(runner, uid, PROMPT, 12)


def test_free_rows_are_in_every_step_though_a_mask_is_never_ready_in_time():
    runner = make()
    runner.late_ready = lambda: False
    for uid in (1, 2):
        runner.submit(uid, PROMPT, 20)
    runner.finish()
    slot = runner.seen[2].slot
    steps = [slot in plan.slots for plan in runner.plans]
    first, last = steps.index(True), len(steps) - steps[::-1].index(True)
    assert all(steps[first:last]), "the free row sat out"
    assert runner.seen[1].ids == want(runner, 1, PROMPT, 20)


def test_in_time_masks_cost_a_constrained_row_no_step():
    runner = make()
    runner.submit(1, PROMPT, 20)
    runner.finish()
    assert len(runner.plans) == 21, "one for the prompt, and one for each token, the last for sampling alone"
