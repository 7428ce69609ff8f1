"""What has broken in the caches of runtimes of this kind, each in its smallest form, overlapped and not.

Those of the tree alone stand in tests/radix_cache; a prompt or an output that cannot fit, and no cache at all, in
test_rules.py.
"""

from __future__ import annotations

import random

import numpy as np
import pytest
from differential import Runner

from gapless.runtime.core.config import ServerConfig
from gapless.runtime.core.errors import ConfigError
from gapless.runtime.core.messages import Finish
from gapless.runtime.scheduler import sharing

PROMPT = [(5 * i) % 251 for i in range(40)]


@pytest.fixture(params=[False, True], ids=["overlap", "no-overlap"])
def make(request):
    def make(**options):
        defaults = {"model_path": "toy", "page_size": 1, "max_running_requests": 8, "context_length": 512}
        return Runner(ServerConfig(**defaults | options, disable_overlap_schedule=request.param))

    return make


@pytest.mark.parametrize("page_size", [1, 16])
def test_the_books_balance_after_200_random_requests(make, page_size):
    """Lengths of 1 to 300, shared prefixes, 30 % aborted at any time, every fourth one with a second sample."""
    rng = random.Random(22)
    runner = make(page_size=page_size, max_total_tokens=1024, chunked_prefill_size=64)
    runner.check_tree = lambda: None  # at each turn it would take most of the time
    stems = [[rng.randint(0, 250) for _ in range(300)] for _ in range(4)]
    prompts, aborts, outputs = {}, {}, {}
    for uid in range(1, 201):
        prompt = [*rng.choice(stems)[: rng.randint(0, 299)], uid]
        leader = uid - 1 if uid % 4 == 0 else -1
        prompts[uid] = prompts.get(leader, prompt)
        outputs[uid] = rng.randint(0, 12)
        runner.submit(uid, prompts[uid], outputs[uid], leader=leader)
        if rng.random() < 0.3:
            aborts.setdefault(uid + rng.randint(0, 30), []).append(uid)
        for other in aborts.pop(uid, []):
            runner.abort(other)
        if uid % 3 == 0:
            runner.turn()
    runner.finish()
    Runner.check_tree(runner)
    aborted = 0
    for uid, seen in runner.seen.items():
        want = runner.expected(prompts[uid], outputs[uid])
        aborted += seen.finish == Finish.ABORT
        assert seen.ids == (want[: len(seen.ids)] if seen.finish == Finish.ABORT else want)
    assert aborted >= 20
    assert runner.flush().done
    assert runner.scheduler.batch.cache.available == runner.scheduler.batch.cache.total_pages


def test_pages_that_two_computed_are_kept_once(make, monkeypatch):
    """The later one's table names the tree's pages before its own are free; a third one takes those at once."""
    monkeypatch.setattr(sharing, "LEAST_SHARED", 10_000)  # so that the second does not wait for the first
    runner = make(chunked_prefill_size=16, max_total_tokens=40 + 2 * 50 + 60)
    for uid in (1, 2):
        runner.submit(uid, PROMPT, 50)
    runner.turn()
    assert runner.plans[0].chunks == 2
    while min(len(runner.seen[uid].ids) for uid in (1, 2)) < 3:
        runner.turn()
    rows, first, second = runner.scheduler.batch.rows, runner.seen[1].slot, runner.seen[2].slot
    assert (rows.page_table[first, :40] == rows.page_table[second, :40]).all()
    runner.submit(3, PROMPT[::-1], 20)
    runner.finish()
    assert runner.seen[1].ids == runner.seen[2].ids == runner.expected(PROMPT, 50)
    assert runner.seen[3].ids == runner.expected(PROMPT[::-1], 20)
    assert not any(runner.preemptions.values()), "the pool holds the prompt once, not twice"


@pytest.mark.parametrize(("page_size", "cached"), [(1, 15), (4, 12), (16, 0)])
def test_a_strict_prefix_of_what_is_cached_leaves_a_token_to_compute(make, page_size, cached):
    runner = make(page_size=page_size)
    runner.submit(1, PROMPT, 4)
    runner.finish()
    runner.submit(2, PROMPT[:16], 4)
    runner.finish()
    assert runner.seen[2].cached_tokens == cached
    assert runner.seen[2].ids == runner.expected(PROMPT[:16], 4)


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_one_that_comes_back_computes_what_the_tree_lost(make, page_size):
    """What it computed stays in the tree meanwhile: the budget is taken after the match, so only the rest is."""
    runner = make(page_size=page_size)
    for uid in (1, 2):
        runner.submit(uid, PROMPT[uid:], 30)
    while len(runner.seen[2].ids) < 8:
        runner.turn()
    admission, before = runner.scheduler.admission, len(runner.plans)
    admission.relieve()
    (request,) = admission.preemption.preempted
    while admission.preemption.preempted:
        runner.turn()
    rows, slot = runner.scheduler.batch.rows, request.slot
    (chunk,) = [plan for plan in runner.plans[before:] if plan.chunks]
    computed = int(np.diff(chunk.q_start)[-1])
    assert chunk.slots[-1] == slot and chunk.kv_len[-1] == rows.target_len[slot]
    assert 1 <= computed <= page_size
    runner.finish()
    for uid in (1, 2):
        assert runner.seen[uid].ids == runner.expected(PROMPT[uid:], 30)


def test_taking_pages_does_not_evict_the_prefix_just_matched(make):
    """The prefix is the least recently used of all, and the pool is full."""
    runner = make(max_total_tokens=32)
    runner.submit(1, PROMPT[:16], 0)
    runner.finish()
    runner.submit(2, PROMPT[:15:-1][:16], 0)
    runner.finish()
    assert runner.scheduler.batch.cache.total_pages == 32
    runner.submit(3, [*PROMPT[:16], *range(200, 216)], 1)
    runner.finish()
    assert runner.seen[3].cached_tokens == 16
    assert runner.seen[3].ids == runner.expected([*PROMPT[:16], *range(200, 216)], 1)


def test_equal_names_in_different_fields_share_nothing(make):
    runner = make()
    names = [{}, {"extra_key": "X"}, {"cache_salt": "X"}, {"extra_key": "X", "cache_salt": "X"}]
    for uid, name in enumerate(names * 2, 1):
        runner.submit(uid, PROMPT, 2, **name)
        runner.finish()
    cached = [seen.cached_tokens for seen in runner.seen.values()]
    assert cached == [0] * 4 + [len(PROMPT) - 1] * 4


def test_nothing_from_before_a_flush_is_matched_again(make):
    runner = make()
    for uid, cached in [(1, 0), (2, len(PROMPT) - 1)]:
        runner.submit(uid, PROMPT, 5)
        runner.finish()
        assert runner.seen[uid].cached_tokens == cached
    answer = runner.flush()
    assert answer.pages == len(PROMPT) + 4 and runner.flush().pages == 0
    for uid, cached in [(3, 0), (4, len(PROMPT) - 1)]:
        runner.submit(uid, PROMPT, 5)
        runner.finish()
        assert runner.seen[uid].cached_tokens == cached


@pytest.mark.parametrize("page_size", [1, 16])
def test_a_flush_right_after_the_last_id_succeeds(make, page_size):
    """With a step in flight that still reads the request's pages: these do not come back into the tree."""
    runner = make(page_size=page_size, toy="eos_at=4")
    runner.submit(1, PROMPT, 20, (256,))
    while not runner.seen[1].finish:
        runner.turn()
    assert len(runner.flying) == runner.lag
    assert runner.flush().done
    runner.submit(2, PROMPT, 20, (256,))
    runner.finish()
    assert runner.seen[2].cached_tokens == 0
    assert runner.seen[2].ids == runner.expected(PROMPT, 20, (256,))


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_a_flush_waits_for_those_who_own_no_page(make, mode):
    """Requests that are preempted, swapped out or held back are alive; `Runner.flush` checks what it is told."""
    runner = make(max_total_tokens=60, preemption=mode, chunked_prefill_size=8)
    runner.submit(1, PROMPT[:8], 40)
    runner.submit(2, PROMPT[8:16], 40)
    preempted = runner.scheduler.admission.preemption.preempted
    while not (preempted and not preempted[0].has_pages):
        runner.turn()
    assert (preempted[0].swapped is not None) == (mode == "swap")
    assert not runner.flush().done
    runner.finish()
    assert runner.flush().done
    for uid in (3, 4):
        runner.submit(uid, PROMPT, 2)
    runner.turn()
    assert runner.scheduler.counts[:2] == (1, 1)
    assert not runner.flush().done
    runner.abort(3)
    assert not runner.flush().done
    runner.finish()
    assert runner.flush().done
    assert runner.seen[4].ids == runner.expected(PROMPT, 2)


@pytest.mark.parametrize("mode", ["recompute", "swap", "auto"])
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_one_that_runs_out_of_room_ends_and_the_next_is_served(make, page_size, mode):
    runner = make(max_total_tokens=32, page_size=page_size, preemption=mode)
    runner.submit(1, PROMPT[:8], 100)
    runner.submit(2, PROMPT[8:16], 100)
    runner.finish()
    for uid in (1, 2):
        assert runner.seen[uid].finish == Finish.LENGTH
        assert runner.seen[uid].ids == runner.expected(PROMPT[8 * uid - 8 : 8 * uid], 32 - 8 + 1)


@pytest.mark.parametrize(
    "options",
    [
        {"chunked_prefill_size": 64, "max_num_batched_tokens": 12},
        {"chunked_prefill_size": 10, "page_size": 16},
        {"chunked_prefill_size": 3, "page_size": 64},
        {"context_length": 4096, "max_total_tokens": 70},
        {"max_total_tokens": 70, "page_size": 16},  # six tokens that make no page
    ],
    ids=str,
)
def test_sizes_that_do_not_divide_each_other_work(make, options):
    runner = make(**options)
    runner.submit(1, PROMPT, 20)
    runner.submit(2, PROMPT[:30], 20)
    runner.finish()
    assert all(len(plan.ids) <= options.get("max_num_batched_tokens", 1024) for plan in runner.plans)
    for uid, prompt in [(1, PROMPT), (2, PROMPT[:30])]:
        assert runner.seen[uid].ids == runner.expected(prompt, 20)


@pytest.mark.parametrize(
    "options",
    [
        {"max_num_batched_tokens": 15, "max_running_requests": 16},
        {"max_total_tokens": 15, "page_size": 16},
    ],
    ids=str,
)
def test_sizes_that_cannot_work_are_refused_with_both(options):
    with pytest.raises(ConfigError) as error:
        ServerConfig(model_path="toy", **options)
    assert all(
        f"--{name.replace('_', '-')} {value}" in error.value.message for name, value in options.items()
    )
