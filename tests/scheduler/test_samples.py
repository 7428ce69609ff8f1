"""n samples of one prompt: the first computes it, the others share its pages, copy the last and compute one token."""

from __future__ import annotations

import pytest
from differential import MODES, Runner

from gapless.runtime.core.config import ServerConfig
from gapless.runtime.core.messages import Finish
from gapless.runtime.policies.registry import QUEUES

PROMPT = [(7 * i + i // 50) % 251 for i in range(100)]
OUTPUT, SAMPLES = 6, 4


@pytest.fixture(params=MODES.values(), ids=MODES)
def make(request):
    def make(**options):
        defaults = {
            "model_path": "toy",
            "page_size": 16,
            "max_running_requests": 16,
            "context_length": 512,
            "chunked_prefill_size": 32,
        }
        return Runner(ServerConfig(**defaults | request.param | options))

    return make


def send(
    runner: Runner, prompt: list[int], output: int = OUTPUT, count: int = SAMPLES, first: int = 1
) -> None:
    for uid in range(first, first + count):
        runner.submit(uid, prompt, output, leader=first if uid > first else -1)


def prompt_tokens(runner: Runner, output: int = OUTPUT) -> int:
    """Tokens computed beside the outputs'; each output's last one is not computed."""
    decoded = sum(max(len(seen.ids) - 1, 0) for seen in runner.seen.values())
    return sum(len(plan.ids) for plan in runner.plans) - decoded


def copied(runner: Runner) -> list[int]:
    """Pages of each copy within the pool."""
    copies = [copy for plan in runner.plans for copy in plan.copies]
    return [len(copy.source) for copy in copies if copy.kind == "page"]


@pytest.mark.parametrize(
    ("page_size", "length", "copies"),
    [(16, 100, 3), (16, 9, 3), (64, 40, 3), (16, 2, 3), (16, 1, 0), (16, 97, 0), (1, 100, 0), (1, 1, 0)],
)
def test_the_prompt_is_computed_once(make, page_size, length, copies):
    """A copy where the page of the prompt's last token is partly filled before it."""
    runner = make(page_size=page_size)
    send(runner, PROMPT[:length])
    runner.finish()
    assert prompt_tokens(runner) == length + SAMPLES - 1
    assert copied(runner) == [1] * copies
    assert [seen.ids for seen in runner.seen.values()] == [runner.expected(PROMPT[:length], OUTPUT)] * SAMPLES
    assert [seen.cached_tokens for seen in runner.seen.values()] == [0] + [length - 1] * (SAMPLES - 1)


@pytest.mark.parametrize("policy", QUEUES)
def test_each_of_several_prompts_is_computed_once(make, policy):
    """There is a slot for each of them: whoever comes when the first has left finds its full pages alone."""
    runner = make(schedule_policy=policy, chunked_prefill_size=16, max_running_requests=len(PROMPT))
    prompts = [PROMPT[i : i + 23 + i] for i in range(5)]
    for number, prompt in enumerate(prompts):
        send(runner, prompt, first=1 + number * SAMPLES)
    runner.finish()
    assert prompt_tokens(runner) == sum(len(prompt) + SAMPLES - 1 for prompt in prompts)
    for uid, seen in runner.seen.items():
        assert seen.ids == runner.expected(prompts[(uid - 1) // SAMPLES], OUTPUT)


@pytest.mark.parametrize("length", [9, 40, 100])
@pytest.mark.parametrize("turns", range(6))
def test_the_first_is_aborted(make, turns, length):
    """While it waits, in its prefill, and later: the others go on, and share full pages among themselves."""
    runner = make(chunked_prefill_size=16)
    send(runner, PROMPT[:length])
    for _ in range(turns):
        runner.turn()
    runner.abort(1)
    runner.finish()
    want = runner.expected(PROMPT[:length], OUTPUT)
    assert runner.seen[1].finish in (Finish.ABORT, Finish.LENGTH)
    assert [runner.seen[uid].ids for uid in range(2, SAMPLES + 1)] == [want] * (SAMPLES - 1)
    if length >= 48:  # less than two pages are not worth waiting for
        assert prompt_tokens(runner) <= length + (runner.lag * runner.steps) * 16 + SAMPLES * 16


def test_the_first_is_aborted_while_it_waits_for_a_slot(make):
    runner = make(max_running_requests=1, max_num_batched_tokens=64)
    runner.submit(99, PROMPT[::-1], 20)
    send(runner, PROMPT)
    for _ in range(4):
        runner.turn()
    for uid in (1, 3):
        runner.abort(uid)
        runner.collect()
        assert runner.seen[uid].finish == Finish.ABORT
    runner.finish()
    want = runner.expected(PROMPT, OUTPUT)
    assert [runner.seen[uid].ids for uid in (2, 4)] == [want, want]
    assert runner.seen[99].ids == runner.expected(PROMPT[::-1], 20)


def test_the_first_is_aborted_while_it_waits_for_pages(make):
    """The others want more output, so that they come first under lof; they wait for it until it goes."""
    runner = make(schedule_policy="lof", max_total_tokens=160)
    runner.submit(99, PROMPT[::-1], 20)
    while not runner.seen[99].ids:
        runner.turn()
    runner.submit(1, PROMPT, OUTPUT - 1)
    for uid in (2, 3):
        runner.submit(uid, PROMPT, OUTPUT, leader=1)
    runner.turn()
    waiting = runner.scheduler.admission.waiting
    assert [request.held_on is waiting[1] for request in waiting.values()] == [False, True, True]
    runner.abort(1)
    runner.finish()
    assert [runner.seen[uid].ids for uid in (2, 3)] == [runner.expected(PROMPT, OUTPUT)] * 2
    assert runner.seen[99].ids == runner.expected(PROMPT[::-1], 20)


@pytest.mark.parametrize("first_output", [0, 1])
@pytest.mark.parametrize("length", [9, 100])
def test_the_first_is_done_at_once(make, length, first_output):
    """Then its last page may be gone; its full pages are in the tree."""
    runner = make()
    runner.submit(1, PROMPT[:length], first_output)
    for uid in range(2, SAMPLES + 1):
        runner.submit(uid, PROMPT[:length], OUTPUT, leader=1)
    runner.finish()
    want = runner.expected(PROMPT[:length], OUTPUT)
    assert [runner.seen[uid].ids for uid in range(2, SAMPLES + 1)] == [want] * (SAMPLES - 1)
    assert runner.seen[1].ids == want[:first_output]
    assert prompt_tokens(runner) <= length + (SAMPLES - 1) * ((length - 1) % 16 + 1)


@pytest.mark.parametrize("eos_at", [1, 2])
def test_all_end_early(make, eos_at):
    runner = make(toy=f"eos_at={eos_at}")
    for uid in range(1, SAMPLES + 1):
        runner.submit(uid, PROMPT, OUTPUT, (256,), leader=1 if uid > 1 else -1)
    runner.finish()
    want = runner.expected(PROMPT, OUTPUT, (256,))
    assert [seen.ids for seen in runner.seen.values()] == [want] * SAMPLES
    assert {seen.finish for seen in runner.seen.values()} == {Finish.STOP_TOKEN}


@pytest.mark.parametrize("mode", ["recompute", "swap", "auto"])
@pytest.mark.parametrize("page_size", [1, 16])
def test_samples_in_a_pool_that_holds_little_more_than_one(make, page_size, mode):
    runner = make(page_size=page_size, preemption=mode, max_total_tokens=160)
    send(runner, PROMPT[:50], output=60, count=6)
    runner.finish()
    assert [seen.ids for seen in runner.seen.values()] == [runner.expected(PROMPT[:50], 60)] * 6
    assert any(runner.preemptions.values())


def test_one_slot_serves_all(make):
    runner = make(max_running_requests=1, max_num_batched_tokens=64)
    send(runner, PROMPT, count=9)
    runner.finish()
    assert [seen.ids for seen in runner.seen.values()] == [runner.expected(PROMPT, OUTPUT)] * 9


@pytest.mark.parametrize("field", ["extra_key", "prompt", "leader"])
def test_a_sample_that_is_none_copies_nothing(make, field):
    """Another namespace, another prompt, or a first one that nobody knows: computed like any other request."""
    runner = make()
    mine = PROMPT[:40]
    theirs = mine if field != "prompt" else [*mine[:-1], 251]
    runner.submit(1, mine, OUTPUT)
    more = {"extra_key": "x"} if field == "extra_key" else {}
    runner.submit(2, theirs, OUTPUT, leader=77 if field == "leader" else 1, **more)
    runner.finish()
    assert runner.seen[2].ids == runner.expected(theirs, OUTPUT)
    assert runner.seen[2].cached_tokens == (0 if field == "extra_key" else 32)
    assert copied(runner) == []


def test_without_a_cache_each_is_computed(make):
    runner = make(disable_radix_cache=True)
    send(runner, PROMPT)
    runner.finish()
    assert prompt_tokens(runner) == SAMPLES * len(PROMPT)
    assert [seen.ids for seen in runner.seen.values()] == [runner.expected(PROMPT, OUTPUT)] * SAMPLES
