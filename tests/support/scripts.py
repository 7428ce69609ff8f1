"""Scripts for the differential runner: arrivals, aborts, stops and lengths, and what must come of them."""

from __future__ import annotations

import dataclasses
import random
from dataclasses import dataclass
from typing import Any

from differential import Runner
from embeddings import toy_state
from toy_logprobs import check_logprobs

from gapless.runtime.core.config import ServerConfig
from gapless.runtime.core.logprobs import LogprobParams
from gapless.runtime.core.messages import Finish, ReleaseGroup
from gapless.runtime.scheduler.groups import LEASE_S, SHARE
from gapless.runtime.scheduler.request import Request

TURNS = 45
_STEMS = [[(7 * i + 3 * j) % 250 for i in range(40)] for j in range(3)]
_EOS = 256


@dataclass(frozen=True)
class Step:
    """One request of a script; times are turns of the loop."""

    prompt: list[int]
    max_new_tokens: int
    stop_ids: tuple[int, ...]
    arrive: int
    abort: int | None  # when
    stop: int | None  # the output length at which the detokenizer finds a stop string
    stop_delay: int  # turns that its word takes
    priority: int = 0
    sample_of: int | None = None  # the uid of the first of n samples of the same prompt
    extra_key: str = ""
    cache_salt: str = ""
    flush: int | None = None  # when somebody asks for a flush
    logprobs: LogprobParams | None = None
    embed: bool = False
    group: str = ""
    hold: bool = False
    release: int | None = None  # when somebody releases the group


def random_config(rng: random.Random, **cell: Any) -> ServerConfig:
    """Options that make trouble likely, with `cell` given."""
    drawn = {
        "max_num_batched_tokens": rng.choice([8, 32, 256]),
        "max_running_requests": rng.randint(1, 6),
        "max_total_tokens": rng.choice([64, 96, 160, 1024]),
        "context_length": rng.choice([64, 128]),
        "schedule_policy": rng.choice(["fcfs", "lpm", "dfs-weight", "lof", "random", "priority"]),
        "radix_eviction_policy": rng.choice(["lru", "lfu", "slru", "priority", "fifo"]),
        "preemption": rng.choice(["recompute", "swap", "auto"]),
        "toy": rng.choice(["", "eos_at=3", "eos_at=1", "vocab_size=257", "host_pages=9"]),
    }
    return ServerConfig(model_path="toy", **drawn | cell)


def random_script(rng: random.Random) -> list[Step]:
    """Some of the steps are n samples of one prompt, each after the first by itself but for the prompt."""
    script: list[Step] = []
    for _ in range(rng.randint(1, 9)):
        step, leader = _random_step(rng), len(script) + 1
        script.append(step)
        for _ in range(rng.choice([0, 0, 0, 1, 3])):
            sample = _random_step(rng)
            same = {"prompt": step.prompt, "arrive": step.arrive, "sample_of": leader}
            same |= {"extra_key": step.extra_key, "cache_salt": step.cache_salt}
            script.append(dataclasses.replace(sample, **same))
    return script


def _random_step(rng: random.Random) -> Step:
    stem = rng.choice(_STEMS)[: rng.randint(0, 40)]
    tail = [rng.randint(0, 255) for _ in range(rng.randint(0, 6))]
    embed = rng.choice([False, False, False, True])
    return Step(
        prompt=stem + tail or [1],
        max_new_tokens=0 if embed else rng.choice([0, 1, 2, 5, 17, 40]),
        stop_ids=rng.choice([(), (_EOS,), (_EOS, 9, 77, 140, 200, 12)]),
        arrive=rng.choice([0, rng.randint(0, 30)]),
        abort=rng.choice([None, None, rng.randint(0, 40)]),
        stop=rng.choice([None, None, rng.randint(1, 12)]),
        stop_delay=rng.choice([0, 0, 1, 2, 5]),
        priority=rng.choice([0, 0, 1, 7]),
        extra_key=rng.choice(["", "", "", "x"]),
        cache_salt=rng.choice(["", "", "", "x"]),
        flush=rng.choice([None, None, None, rng.randint(0, 40)]),
        logprobs=rng.choice([None, None, _random_logprobs(rng, len(stem + tail))]),
        embed=embed,
        group=rng.choice(["", "", "a", "b"]),
        hold=rng.random() < 0.5,
        release=rng.choice([None, None, rng.randint(0, 40)]),
    )


def _random_logprobs(rng: random.Random, length: int) -> LogprobParams:
    start = rng.choice([0, length, rng.randint(0, length)])
    return LogprobParams(start, rng.choice([0, 1, 5]), rng.choice([(), (3,), (200, 3)]))


def run_script(config: ServerConfig, script: list[Step], *, late: bool) -> Runner:
    """Runs the script to its end; raises AssertionError if anything but the closed form comes of it."""
    runner = Runner(config, late=late)
    _check_preemptions(runner)
    found: dict[int, int] = {}  # the turn in which a stop string was found
    stopped: set[int] = set()
    for now in range(TURNS):
        for uid, step in enumerate(script, 1):
            if step.arrive == now:
                leader = -1 if step.sample_of is None else step.sample_of
                more = {"priority": step.priority, "leader": leader}
                more |= {
                    "extra_key": step.extra_key,
                    "cache_salt": step.cache_salt,
                    "logprobs": step.logprobs,
                    "embed": step.embed,
                    "group": step.group,
                    "hold": step.hold,
                }
                runner.submit(uid, step.prompt, step.max_new_tokens, step.stop_ids, **more)
            if step.abort == now and uid in runner.seen:
                runner.abort(uid)
            if step.flush == now:
                runner.flush()
            if step.release == now:
                runner.scheduler.handle([ReleaseGroup(step.group)])
            seen = runner.seen.get(uid)
            if seen and step.stop and len(seen.ids) >= step.stop:
                found.setdefault(uid, now)
            if uid in found and uid not in stopped and now >= found[uid] + step.stop_delay:
                runner.stop(uid, step.stop)
                stopped.add(uid)
        _pass_time(runner, now)
        runner.turn()
    # Who was stopped gets no terminal from the scheduler: the detokenizer, who found the stop, is its author.
    for uid in stopped:
        if not runner.seen[uid].finish:
            runner.seen[uid].finish = Finish.STOP_STRING
    runner.finish()
    for uid, step in enumerate(script, 1):
        _check(runner, step, uid)
    return runner


def _check_preemptions(runner: Runner) -> None:
    """Nobody is preempted while pages are held."""
    preemption = runner.scheduler.admission.preemption
    preempt = preemption.preempt

    def checked(request: Request) -> Request:
        assert not runner.scheduler.batch.groups.pages, "a request is preempted and pages are held"
        return preempt(request)

    preemption.preempt = checked


def _pass_time(runner: Runner, now: int) -> None:
    """So that leases end within a script."""
    groups, cache = runner.scheduler.batch.groups, runner.scheduler.batch.cache
    groups.clock = lambda: now * LEASE_S / 8
    runner.scheduler.handle([])
    assert groups.pages <= min(cache.used_pages, cache.total_pages // SHARE)


def _check(runner: Runner, step: Step, uid: int) -> None:
    seen, prompt, scheduler = runner.seen[uid], step.prompt, runner.scheduler
    if len(prompt) > scheduler.max_prompt_tokens:
        assert seen.finish in (Finish.FAILED, Finish.ABORT)
        return
    room = min(scheduler.context_length - len(prompt), scheduler.pool_tokens - len(prompt) + 1)
    count = min(step.max_new_tokens, room)
    want = runner.expected(prompt, count, step.stop_ids)
    embeddings = [found.embedding for _, found in seen.logprobs if found.embedding]
    seen.logprobs = [(of_prompt, found) for of_prompt, found in seen.logprobs if not found.embedding]
    expected = [toy_state(prompt, runner.knobs).tobytes()]
    assert embeddings == (expected if step.embed and seen.finish == Finish.LENGTH else [])
    check_logprobs(runner.knobs, prompt, step.logprobs, seen)
    if seen.finish in (Finish.ABORT, Finish.STOP_STRING):
        assert seen.ids == want[: len(seen.ids)]
        return
    assert seen.ids == want
    assert seen.finish == (Finish.STOP_TOKEN if want and want[-1] in step.stop_ids else Finish.LENGTH)
    assert 0 <= seen.cached_tokens < len(prompt)
    if not runner.preemptions.get(uid):
        assert seen.decodes <= max(count - 1, 0), "a forward beyond the known limit"
        assert seen.decodes <= len(want) + (runner.lag + 1) * runner.steps
