"""What has broken in overlapped schedulers of this kind, each in its smallest form, overlapped and not."""

from __future__ import annotations

import re

import numpy as np
import pytest
from differential import MODES, Runner

from gapless.runtime.core.config import ServerConfig
from gapless.runtime.core.messages import Finish
from gapless.runtime.model.toy import toy_output

PROMPT = [(5 * i) % 251 for i in range(40)]


@pytest.fixture(params=MODES.values(), ids=MODES)
def make(request):
    def make(make_grammar=lambda _: None, **options):
        defaults = {"model_path": "toy", "page_size": 1, "max_running_requests": 8, "context_length": 1024}
        return Runner(ServerConfig(**defaults | request.param | options), make_grammar=make_grammar)

    return make


def test_a_prompt_of_many_chunks_takes_nobody_s_future_token(make):
    """Where each chunk took a place in a ring of placeholders, one long prompt lapped the ring."""
    runner = make(max_running_requests=4, chunked_prefill_size=16)
    long_prompt = [(3 * i) % 250 for i in range(16 * 40)]
    runner.submit(1, PROMPT, 200)
    for _ in range(5):
        runner.turn()
    runner.submit(2, long_prompt, 5)
    runner.finish()
    assert runner.seen[1].ids == runner.expected(PROMPT, 200)
    assert runner.seen[2].ids == runner.expected(long_prompt, 5)


def test_64_requests_at_once_get_what_each_gets_alone(make):
    runner = make(max_running_requests=64, max_num_batched_tokens=256)
    prompts = {uid: [uid, *PROMPT[: uid % 17]] for uid in range(1, 65)}
    for uid, prompt in prompts.items():
        runner.submit(uid, prompt, 30 + uid % 7)
    runner.finish()
    for uid, prompt in prompts.items():
        assert runner.seen[uid].ids == runner.expected(prompt, 30 + uid % 7)


def test_a_row_preempted_in_flight_keeps_its_late_token_once(make):
    """The step that was launched before the preemption still decides; after it the row is computed anew."""
    runner = make()
    for uid in (1, 2):
        runner.submit(uid, PROMPT[:8], 30)
    for _ in range(4):
        runner.turn()
    for _ in range(2):  # twice, with steps in flight each time
        admission, before = runner.scheduler.admission, len(runner.seen[2].ids)
        admission.relieve()
        while not admission.batch.running.size < 2:
            runner.turn()
        assert len(runner.seen[2].ids) >= before
        while admission.preemption.preempted:
            runner.turn()
        runner.turn()
    assert runner.preemptions[2] == 2
    runner.finish()
    for uid in (1, 2):
        assert runner.seen[uid].ids == runner.expected(PROMPT[:8], 30)


END = 256
LETTERS = {
    80: "a",
    10: "b",
    250: "c",
    20: "d",
    450: "e",
    END: "",
}  # ids so far apart that each is chosen at times
NEXT: dict[str, list[int]] = {
    "": [80, 250],
    "a": [10],
    "b": [80, 250, 450],
    "c": [20],
    "d": [80, 250, 450],
    "e": [END],
}


class PatternGrammar:
    """(ab|cd)+e: what may follow depends on the last letter."""

    def __init__(self):
        self.last = ""

    def mask(self, wait_s):
        bits = np.zeros(512, np.uint8)
        bits[NEXT[self.last]] = 1
        return np.packbits(bits, bitorder="little").view(np.int32)

    def accept(self, token):
        self.last = LETTERS[token]


def test_masks_are_made_from_the_state_after_the_newest_token(make):
    """100 requests, every second one under (ab|cd)+e; the others run as if they were alone."""
    runner = make(
        make_grammar=lambda submit: PatternGrammar() if submit.uid % 2 else None,
        max_running_requests=16,
        max_num_batched_tokens=256,
    )
    prompts = {uid: [uid, *PROMPT[:5]] for uid in range(1, 101)}
    for uid, prompt in prompts.items():
        runner.submit(uid, prompt, 60, (END,))
    runner.finish()
    ended = 0
    for uid, prompt in prompts.items():
        seen = runner.seen[uid]
        if uid % 2 == 0:
            assert seen.ids == runner.expected(prompt, 60, (END,))
            continue
        text = "".join(LETTERS[token] for token in seen.ids)
        ended += seen.finish == Finish.STOP_TOKEN
        assert re.fullmatch("(ab|cd)+e" if seen.finish == Finish.STOP_TOKEN else "(ab|cd)*[ac]?e?", text)
    assert ended >= 40, "most of the 50 end by themselves"


def test_an_abort_that_meets_the_finish_is_ignored(make):
    runner = make()
    for uid in range(1, 101):
        runner.submit(uid, [uid], 3)
    while any(not seen.finish for seen in runner.seen.values()):
        runner.turn()
        for uid, seen in runner.seen.items():
            if seen.finish:
                runner.abort(uid)  # also while its last step is in flight
    runner.finish()
    assert {seen.finish for seen in runner.seen.values()} == {Finish.LENGTH}


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("end", ["finish", "preempt", "abort"])
def test_a_row_gives_back_what_the_overrun_step_held_once(make, page_size, end):
    runner = make(page_size=page_size, toy="eos_at=5", max_total_tokens=64 if end == "preempt" else 1024)
    for uid in range(1, 5):
        runner.submit(uid, PROMPT[: 10 + uid], 30, (256,) if end == "finish" else ())
    for turn in range(60):
        if end == "abort" and turn in (3, 5, 6):
            runner.abort(turn // 2)
        runner.turn()
    runner.finish()
    assert end != "preempt" or any(runner.preemptions.values())


def test_a_slot_is_not_given_on_while_a_launched_step_reads_it(make):
    """One slot, many short requests; each step reads its tables as late as it can."""
    runner = make(max_running_requests=1, max_num_batched_tokens=64, toy="eos_at=2")
    for uid in range(1, 200):
        runner.submit(uid, [uid % 250, uid // 250, 3], 9, (256,))
    runner.finish()
    for uid in range(1, 200):
        assert runner.seen[uid].ids == runner.expected([uid % 250, uid // 250, 3], 9, (256,))


def test_no_step_reads_a_table_entry_that_was_not_written(make):
    """The toy's table is -1 where nothing was written, and it refuses to read that; each slot here is new."""
    runner = make(page_size=4, max_running_requests=32, max_num_batched_tokens=64, chunked_prefill_size=5)
    for uid in range(1, 33):
        runner.submit(uid, PROMPT[: uid + 3], 25)
    runner.finish()
    assert (runner.worker.model._table[1:33] > 0).any(axis=1).all()
    for uid in range(1, 33):
        assert runner.seen[uid].ids == toy_output(runner.knobs, PROMPT[: uid + 3], 25)
