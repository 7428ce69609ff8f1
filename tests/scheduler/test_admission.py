"""Who is admitted when: a prefix that several wait for is computed once, nobody starves, a long queue costs nothing.

How many tokens were computed is counted from the plans: each row computes its output's tokens but the last.
"""

from __future__ import annotations

import gc
import itertools
import math
import statistics
import sys

import numpy as np
import pytest
from differential import MODES, Runner

from gapless.radix_cache.tree import RadixTree
from gapless.runtime.core.config import ServerConfig
from gapless.runtime.core.messages import Finish, Submit, column
from gapless.runtime.core.sampling import SamplingParams
from gapless.runtime.policies.lpm import AGEING, PUSH_MATCHES
from gapless.runtime.policies.registry import QUEUES
from gapless.runtime.scheduler.admission import MOST_HELD

PREFIX = [(7 * i + i // 50) % 251 for i in range(96)]
CHUNK, TAIL, OUTPUT, COUNT = 32, 5, 4, 8


@pytest.fixture(params=MODES.values(), ids=MODES)
def make(request):
    def make(**options):
        defaults = {
            "model_path": "toy",
            "page_size": 16,
            "max_running_requests": 16,
            "context_length": 512,
            "chunked_prefill_size": CHUNK,
        }
        return Runner(ServerConfig(**defaults | request.param | options))

    return make


def prompt_of(uid: int) -> list[int]:
    return [*PREFIX, uid, *[(3 * uid + i) % 250 for i in range(1, TAIL)]]


def send(runner: Runner, uids: range, **more) -> None:
    for uid in uids:
        runner.submit(uid, prompt_of(uid), OUTPUT, **more)


def computed(runner: Runner) -> int:
    return sum(len(plan.ids) for plan in runner.plans)


def once(count: int) -> int:
    """Tokens where so many share one prefix: it, their tails, and outputs but their last tokens."""
    return len(PREFIX) + count * (TAIL + OUTPUT - 1)


def check_ids(runner: Runner, uids) -> None:
    for uid in uids:
        assert runner.seen[uid].ids == runner.expected(prompt_of(uid), OUTPUT)


def held(runner: Runner) -> list[int]:
    waiting = runner.scheduler.admission.waiting
    return [uid for uid, request in waiting.items() if request.held_on is not None]


@pytest.mark.parametrize("policy", QUEUES)
@pytest.mark.parametrize("page_size", [1, 16])
def test_a_shared_prefix_is_computed_once(make, page_size, policy):
    runner = make(page_size=page_size, schedule_policy=policy)
    send(runner, range(1, COUNT + 1))
    runner.turn()
    assert len(held(runner)) == COUNT - 1
    runner.finish()
    assert computed(runner) == once(COUNT)
    assert sorted(seen.cached_tokens for seen in runner.seen.values()) == [0] + [len(PREFIX)] * (COUNT - 1)
    check_ids(runner, runner.seen)


@pytest.mark.parametrize("turns", range(1, 5))
@pytest.mark.parametrize("page_size", [1, 16])
def test_the_next_takes_over_where_the_first_is_aborted(make, page_size, turns):
    """Chunks that were in flight then may be computed again, but no others."""
    runner = make(page_size=page_size)
    send(runner, range(1, COUNT + 1))
    for _ in range(turns):
        runner.turn()
    runner.abort(1)
    runner.finish()
    check_ids(runner, range(2, COUNT + 1))
    assert computed(runner) <= once(COUNT) + runner.lag * runner.steps * CHUNK


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_the_next_takes_over_where_the_first_is_preempted(make, page_size, mode):
    runner = make(page_size=page_size, preemption=mode, chunked_prefill_size=16)
    runner.submit(99, PREFIX[::-1], 60)  # the oldest never gives way
    while not runner.seen[99].ids:
        runner.turn()
    send(runner, range(1, COUNT + 1))
    runner.turn()
    assert held(runner) == list(range(2, COUNT + 1))
    (preempted,) = runner.scheduler.admission.preemption.relieve()
    runner.scheduler.admission._release_from([preempted])
    assert preempted.submit.uid == 1 and not held(runner)
    runner.finish()
    check_ids(runner, range(1, COUNT + 1))
    assert runner.seen[99].ids == runner.expected(PREFIX[::-1], 60)


@pytest.mark.parametrize("output", [0, 1])
def test_the_first_may_end_with_its_prompt(make, output):
    runner = make()
    runner.submit(1, prompt_of(1), output)
    send(runner, range(2, COUNT + 1))
    runner.finish()
    check_ids(runner, range(2, COUNT + 1))
    assert computed(runner) == once(COUNT) - (OUTPUT - 1)


def test_those_who_are_held_can_be_aborted(make):
    runner = make()
    send(runner, range(1, COUNT + 1))
    runner.turn()
    for uid in held(runner):
        runner.abort(uid)
        runner.collect()
        assert runner.seen[uid].finish == Finish.ABORT
    runner.finish()
    check_ids(runner, [1])
    assert computed(runner) == once(1)


def test_a_chain_of_prefixes_is_computed_once(make):
    """Each shares with the one before all that this one brought, and more than with any earlier one."""
    runner = make(page_size=1)
    parts = [PREFIX, PREFIX[::-1], [(11 * i) % 249 for i in range(64)], [(13 * i) % 247 for i in range(80)]]
    prompts = [[*itertools.chain(*parts[: i + 1]), 250 - i] for i in range(len(parts))]
    for uid, prompt in enumerate(prompts, 1):
        runner.submit(uid, prompt, OUTPUT)
    runner.finish()
    for uid, prompt in enumerate(prompts, 1):
        assert runner.seen[uid].ids == runner.expected(prompt, OUTPUT)
    assert computed(runner) == sum(map(len, parts)) + len(parts) * (1 + OUTPUT - 1)


@pytest.mark.parametrize("name", ["extra_key", "cache_salt"])
def test_other_namespaces_do_not_wait(make, name):
    runner = make()
    send(runner, range(1, 5))
    send(runner, range(5, 9), **{name: "x"})
    runner.turn()
    assert held(runner) == [2, 3, 4, 6, 7, 8]
    runner.finish()
    assert computed(runner) == 2 * once(4)
    check_ids(runner, runner.seen)


def test_without_a_cache_nobody_waits(make):
    runner = make(disable_radix_cache=True)
    send(runner, range(1, COUNT + 1))
    runner.turn()
    assert not held(runner)
    runner.finish()
    assert computed(runner) == COUNT * once(1)
    check_ids(runner, runner.seen)


@pytest.mark.parametrize(("shared", "waits"), [(31, False), (32, True)])
def test_a_short_common_prefix_is_not_waited_for(make, shared, waits):
    runner = make(page_size=1)
    for uid in (1, 2):
        runner.submit(uid, [*PREFIX[:shared], *[uid] * 30], OUTPUT)
    runner.turn()
    assert runner.plans[0].chunks == 2 - waits
    runner.finish()
    for uid in (1, 2):
        assert runner.seen[uid].ids == runner.expected([*PREFIX[:shared], *[uid] * 30], OUTPUT)


def test_a_crowd_that_waits_for_one_does_not_hold_up_others(make):
    runner = make(chunked_prefill_size=4)
    crowd = range(1, 2 * MOST_HELD + 3)
    send(runner, crowd)
    runner.submit(999, PREFIX[::-1], OUTPUT)
    for _ in range(4):
        runner.turn()
    assert runner.seen[999].slot, "it is admitted while the first of the crowd computes"
    runner.finish()
    check_ids(runner, crowd)
    assert computed(runner) == once(len(crowd)) + len(PREFIX) + OUTPUT - 1


def test_a_cold_request_is_admitted_within_the_bound_of_lpm(make):
    """Room for one at a time, and whenever one is admitted another comes whose prompt is cached but for a token."""
    runner = make(page_size=1, max_running_requests=1, schedule_policy="lpm", chunked_prefill_size=96)
    runner.submit(1, PREFIX, 1)
    runner.finish()
    runner.submit(2, PREFIX[::-1], 1)
    for uid in range(3, 20):
        admitted = sum(seen.slot > 0 for seen in runner.seen.values())
        runner.submit(uid, [*PREFIX, uid], 1)
        while sum(seen.slot > 0 for seen in runner.seen.values()) == admitted:
            runner.turn()
    runner.finish()
    first_positions = [int(plan.positions[0]) for plan in runner.plans[1:]]
    passed = first_positions.index(0)
    assert 1 <= passed <= math.ceil(len(PREFIX) / AGEING)


def run(runner: Runner, plan) -> np.ndarray:
    runner.worker.sample_late(plan)
    return runner.worker.run(plan)


def submit_many(runner: Runner, count: int) -> None:
    params = SamplingParams(max_new_tokens=100, temperature=0.0)
    group = [column([uid % 50, *PREFIX[:40], uid % 256, uid // 256], "<i4") for uid in range(count)]
    runner.scheduler.handle([Submit(uid, ids, params, (), seed=0) for uid, ids in enumerate(group, 1)])


@pytest.mark.parametrize("policy", QUEUES)
def test_a_long_queue_costs_a_step_nothing(policy, monkeypatch):
    """5,000 waiting: a step matches no more of them than of 1,000, and makes as many calls."""

    def per_step(count: int) -> tuple[int, float]:
        config = ServerConfig(model_path="toy", schedule_policy=policy, max_running_requests=8)
        runner = Runner(config, late=False)
        submit_many(runner, count)
        matched, calls = [], []
        for turn in range(40):
            with monkeypatch.context() as patch:
                numbers = [0, 0]

                def match(*args, match=RadixTree.match, numbers=numbers):
                    numbers[0] += 1
                    return match(*args)

                def count_call(frame, event, arg, numbers=numbers):
                    numbers[1] += event in ("call", "c_call")

                patch.setattr(RadixTree, "match", match)
                gc.disable()  # others' callbacks of the collector are calls, too
                sys.setprofile(count_call)
                plan = runner.scheduler.compose()
                sys.setprofile(None)
                gc.enable()
            matched.append(numbers[0])
            calls.append(numbers[1])
            runner.scheduler.retire(plan, run(runner, plan), np.empty(0, np.int64))
            if turn % 4 == 3:  # a slot becomes free, so that another one is admitted
                slot = int(plan.slots[0])
                runner.scheduler._abort(runner.scheduler.batch.request(slot).submit.uid)
        return max(matched), statistics.median(calls)

    few, many = per_step(1000), per_step(5000)
    assert many[0] <= 3 * MOST_HELD + PUSH_MATCHES
    assert many[0] <= 1.2 * few[0] + 8 and many[1] <= 1.2 * few[1]
