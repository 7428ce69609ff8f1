"""Requests that give way: the same ids as if they had not, whether their KV is moved or computed again, and not often.

Most tests have a pool of POOL tokens: each request fits alone, and all together need four times as many.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from differential import Runner

from gapless.bench.random_model import TINY, write_random_model
from gapless.overlap.torch_worker import TorchWorker
from gapless.overlap.toy_worker import COSTS
from gapless.runtime.core.config import ServerConfig
from gapless.runtime.core.messages import Finish
from gapless.runtime.policies.registry import QUEUES
from gapless.runtime.scheduler.reserve import LEAST, MAX_PREEMPTIONS, START
from gapless.runtime.scheduler.swap import SwapSpace

POOL, LARGE = 128, 2048
PROMPTS = {uid: [(uid * 31 + 7 * i) % 251 for i in range(8 + uid)] for uid in range(1, 9)}
OUTPUT = 50
LAGS = {"overlap": {}, "no-overlap": {"disable_overlap_schedule": True}}


@pytest.fixture(params=LAGS.values(), ids=LAGS)
def make(request):
    def make(**options):
        defaults = {"model_path": "toy", "page_size": 1, "max_running_requests": 8, "context_length": 512}
        return Runner(ServerConfig(**defaults | {"max_total_tokens": POOL} | request.param | options))

    return make


def send(runner: Runner, **more) -> None:
    for uid, prompt in PROMPTS.items():
        runner.submit(uid, prompt, OUTPUT, **more)


def check_ids(runner: Runner) -> None:
    for uid, prompt in PROMPTS.items():
        assert runner.seen[uid].ids == runner.expected(prompt, OUTPUT)


def copies(runner: Runner, kind: str) -> int:
    """Pages copied."""
    return sum(len(copy.source) for plan in runner.plans for copy in plan.copies if copy.kind == kind)


def until_swapped(runner: Runner):
    """Turns until a request's KV is on the host, and returns it."""
    preempted = runner.scheduler.admission.preemption.preempted
    while not any(request.swapped for request in preempted):
        assert runner.turn()
    return next(request for request in preempted if request.swapped)


@pytest.mark.parametrize("steps", [1, 4])
@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("mode", ["recompute", "swap", "auto"])
def test_the_ids_are_those_of_a_large_pool(make, mode, page_size, steps):
    runner = make(page_size=page_size, preemption=mode, num_scheduler_steps=steps)
    send(runner)
    runner.finish()
    check_ids(runner)
    assert any(runner.preemptions.values())
    assert bool(copies(runner, "out")) == (mode != "recompute")
    assert max(runner.preemptions.values()) <= MAX_PREEMPTIONS


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("steps", [1, 4])
def test_what_is_swapped_is_not_computed_again(make, page_size, steps):
    runner = make(page_size=page_size, preemption="swap", num_scheduler_steps=steps)
    send(runner)
    runner.finish()
    check_ids(runner)
    assert copies(runner, "in") > 0
    assert sum(len(plan.ids) for plan in runner.plans) == sum(
        len(prompt) + OUTPUT - 1 for prompt in PROMPTS.values()
    )


@pytest.mark.parametrize("page_size", [1, 4])
def test_a_small_host_pool_takes_what_it_can(make, page_size):
    """The others are computed again."""
    runner = make(page_size=page_size, preemption="swap", toy=f"host_pages={24 // page_size}")
    send(runner)
    runner.finish()
    check_ids(runner)
    total = sum(len(prompt) + OUTPUT - 1 for prompt in PROMPTS.values())
    assert copies(runner, "out") > 0
    assert sum(len(plan.ids) for plan in runner.plans) > total


def test_auto_moves_what_is_long():
    space = SwapSpace("auto", 10, COSTS)
    assert [length for length in range(1, 20) if space.takes(1, 0, length)] == list(range(8, 20))
    assert space.takes(1, 100, 104), "four tokens that attend to a hundred others"
    assert not SwapSpace("auto", 10, None).takes(1, 0, 1000)
    assert not space.takes(11, 0, 1000), "there are not so many pages"
    assert not space.takes(0, 0, 16)


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("end", ["abort", "stop", "nothing"])
def test_one_that_is_swapped_out_may_end(make, end, page_size):
    """At rest, which `finish` checks, no host page is held, and no prefix locked."""
    runner = make(page_size=page_size, preemption="swap")
    send(runner)
    uid = until_swapped(runner).submit.uid
    want, length = runner.expected(PROMPTS[uid], OUTPUT), len(runner.seen[uid].ids)
    if end == "abort":
        runner.abort(uid)
    elif end == "stop":
        runner.stop(uid, max(length - 2, 1))
        runner.seen[uid].finish = Finish.STOP_STRING
    runner.finish()
    assert runner.seen[uid].ids == (want if end == "nothing" else want[:length])
    for other, prompt in PROMPTS.items():
        if other != uid:
            assert runner.seen[other].ids == runner.expected(prompt, OUTPUT)


def test_one_that_was_swapped_may_be_preempted_again_at_once(make):
    """Before the step that copies its KV back is even launched, and while it is in flight."""
    runner = make(preemption="swap", page_size=4, max_total_tokens=1024)
    for uid in (1, 2):
        runner.submit(uid, PROMPTS[uid], OUTPUT)
    while len(runner.seen[2].ids) < 3:
        runner.turn()
    admission = runner.scheduler.admission
    for _ in range(4):
        admission.relieve()
        assert admission.preemption.preempted
        while admission.preemption.preempted:
            runner.turn()
    runner.finish()
    for uid in (1, 2):
        assert runner.seen[uid].ids == runner.expected(PROMPTS[uid], OUTPUT)
    assert runner.preemptions[2] == 4 and copies(runner, "out") == copies(runner, "in") > 0


@pytest.mark.parametrize("mode", ["recompute", "swap"])
@pytest.mark.parametrize("turns", range(1, 5))
def test_a_prompt_is_preempted_in_its_chunks(make, mode, turns):
    runner = make(preemption=mode, page_size=4, max_total_tokens=1024, chunked_prefill_size=8)
    prompt = [(3 * i) % 250 for i in range(60)]
    runner.submit(1, PROMPTS[1], OUTPUT)
    runner.submit(2, prompt, OUTPUT)
    for _ in range(turns):
        runner.turn()
    runner.scheduler.admission.relieve()
    runner.finish()
    assert runner.preemptions[2] == 1
    assert runner.seen[2].ids == runner.expected(prompt, OUTPUT)


@pytest.mark.parametrize("policy", QUEUES)
@pytest.mark.parametrize("mode", ["recompute", "swap", "auto"])
def test_a_pool_of_a_twentieth_of_the_need_finishes_all(make, mode, policy):
    rng = random.Random(5)
    prompts = {uid: [rng.randint(0, 250) for _ in range(rng.randint(1, 30))] for uid in range(1, 31)}
    outputs = {uid: rng.randint(1, 20) for uid in prompts}
    needs = [len(prompts[uid]) + outputs[uid] - 1 for uid in prompts]
    pool = max(*needs, sum(needs) // 20)
    runner = make(max_total_tokens=pool, preemption=mode, schedule_policy=policy, chunked_prefill_size=16)
    for uid, prompt in prompts.items():
        runner.submit(uid, prompt, outputs[uid], priority=rng.choice([0, 0, 3]))
    runner.finish()
    for uid, prompt in prompts.items():
        assert runner.seen[uid].ids == runner.expected(prompt, outputs[uid])
    assert max(runner.preemptions.values()) <= MAX_PREEMPTIONS


def test_an_overload_leaves_nothing_behind(make):
    """Each preemption raises the reserve; later it falls, and a light load runs as if nothing had been."""

    def turns_of_a_light_load(runner: Runner, first: int) -> int:
        for uid in range(first, first + 3):
            runner.submit(uid, PROMPTS[1], 20)
        before = len(runner.plans)
        while not all(runner.seen[uid].finish for uid in range(first, first + 3)):
            runner.turn()
        return len(runner.plans) - before

    fresh, runner = make(), make()
    reserve = runner.scheduler.admission.preemption._reserve
    for uid in range(1, 31):
        runner.submit(uid, [uid, *PROMPTS[uid % 8 + 1]], OUTPUT)
    highest = START
    while not runner.scheduler.is_idle:
        runner.turn()
        highest = max(highest, reserve.ratio)
    assert highest > START
    assert 0 < max(runner.preemptions.values()) <= MAX_PREEMPTIONS
    assert sum(runner.preemptions.values()) <= 30
    for scheduler in (fresh.scheduler, runner.scheduler):
        assert scheduler.is_idle and scheduler.batch.cache.available == POOL
    assert fresh.flush().done and runner.flush().done
    assert turns_of_a_light_load(runner, 101) <= 1.1 * turns_of_a_light_load(fresh, 101)
    for _ in range(3000):
        reserve.stepped()
    assert reserve.ratio == LEAST


@pytest.mark.parametrize("mode", ["recompute", "swap"])
@pytest.mark.parametrize(
    ("low_output", "pool", "free", "asked", "victims"),
    [
        (20, 116, 10, 10, 1),
        (24, 132, 16, 40, 2),
        (20, 116, 100, 10, 0),
        (60, 140, 10, 10, 1),
        (60, 140, 4, 40, 2),
        (60, 140, 100, 10, 0),
    ],
)
def test_an_urgent_request_displaces_no_more_than_it_needs(
    make, low_output, pool, free, asked, victims, mode
):
    """Four of 10 tokens run, until less than `free` pages are left: the newest give way, and nobody without need."""
    runner = make(schedule_policy="priority", max_total_tokens=pool, preemption=mode)
    for uid in range(1, 5):
        runner.submit(uid, [uid] * 10, low_output)
    cache, preempted = runner.scheduler.batch.cache, runner.scheduler.admission.preemption.preempted
    while cache.available >= free:
        assert runner.turn()
    assert runner.scheduler.counts[0] == 4
    runner.submit(9, [9] * asked, 1, priority=1)
    for _ in range(100):  # a turn may do nothing but take pages away
        if not runner.seen[9].slot:
            runner.turn()
    assert runner.seen[9].slot
    assert [request.submit.uid for request in preempted] == [3, 4][2 - victims :]
    runner.finish()
    for uid in range(1, 5):
        assert runner.seen[uid].ids == runner.expected([uid] * 10, low_output)
    assert runner.seen[9].ids == runner.expected([9] * asked, 1)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("random")
    write_random_model(directory, TINY, torch.float32)
    return directory


def real_runner(checkpoint: Path, **options) -> Runner:
    defaults = {"page_size": 4, "max_running_requests": 8, "chunked_prefill_size": 16, "dtype": "float32"}
    config = ServerConfig(model_path=str(checkpoint), **defaults | options)
    runner = Runner(config, worker=TorchWorker(config))
    send(runner)
    runner.finish()
    return runner


@pytest.mark.parametrize("options", LAGS.values(), ids=LAGS)
def test_a_real_model_goes_on_where_it_was(checkpoint, options):
    """KV that was moved, or computed again, gives the ids of a pool that holds all."""
    options = options | {"cpu_threads": 1}
    want = real_runner(checkpoint, max_total_tokens=LARGE, **options)
    assert not any(want.preemptions.values())
    assert len({tuple(seen.ids) for seen in want.seen.values()}) == len(PROMPTS)
    for mode in ("swap", "recompute"):
        runner = real_runner(checkpoint, max_total_tokens=POOL, preemption=mode, **options)
        assert any(runner.preemptions.values())
        assert (copies(runner, "in") > 0) == (mode == "swap")
        for uid, seen in runner.seen.items():
            assert seen.ids == want.seen[uid].ids
