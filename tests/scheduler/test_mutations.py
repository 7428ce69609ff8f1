"""The suite catches races: each promise of the scheduler is broken on purpose, and the differential runner goes red.

(That a penalty which counts a placeholder is caught stands with the sampling fields.)
"""

from __future__ import annotations

import inspect
import random
import sys
import textwrap
from collections.abc import Callable
from typing import Any

import pytest
from scripts import random_config, random_script, run_script

from gapless.runtime.scheduler import plan_builder, rows, scheduler
from gapless.runtime.scheduler.batch import Batch
from gapless.runtime.scheduler.groups import Groups
from gapless.runtime.scheduler.rows import Rows
from gapless.runtime.scheduler.scheduler import Scheduler

SCRIPTS = 150


def mutated(function: Callable[..., Any], changes: dict[str, str]) -> Callable[..., Any]:
    """`function` with pieces of its source replaced."""
    source = textwrap.dedent(inspect.getsource(function))
    for old, new in changes.items():
        assert source.count(old) == 1, f"{old!r} is not in {function.__qualname__}: tell the mutant anew"
        source = source.replace(old, new)
    namespace = dict(vars(sys.modules[function.__module__]))
    exec(source, namespace)
    return namespace[function.__name__]


def first_failure() -> str:
    """What goes wrong first in a fixed series of scripts; empty where nothing does."""
    rng = random.Random(20)
    for _ in range(SCRIPTS):
        config = random_config(
            rng,
            disable_overlap_schedule=rng.random() < 0.2,
            num_scheduler_steps=rng.choice([1, 4]),
            page_size=rng.choice([1, 4]),
            chunked_prefill_size=rng.choice([3, 16]),
        )
        try:
            run_script(config, random_script(rng), late=True)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    return ""


# What is broken, and where: owner, function, and pairs of the source that is replaced and what replaces it.
MUTANTS: dict[str, list[tuple[Any, str, dict[str, str]]]] = {
    "a slot and its pages are reused before the event of a step that names them": [
        (Batch, "settle", {"rows.in_flight[slot] or ": ""}),
        (Rows, "close", {"assert self.in_flight[slot] == 0, ": "assert True, "}),
    ],
    "the generation of a stop is not checked": [
        (Scheduler, "_stop", {"rows.generation[slot] != message.generation or ": ""}),
    ],
    "launched positions count as computed": [
        (Scheduler, "retire", {"[slots] = plan.kv_len": "[slots] = rows.launched_len[slots]"}),
    ],
    "a token is read where only its placeholder is": [
        (plan_builder, "_fill_decode", {"ids[:] = -slots": "ids[:] = rows.tokens[slots, begin]"}),
    ],
    "a row whose token in flight fills its limit is launched again": [
        (plan_builder, "_advance", {"|= FULL": "|= 0"}),
    ],
    "a chunk that is not the last is sampled from": [
        (plan_builder, "_rows_that_sample", {">= rows.target_len[slots]": ">= 0"}),
    ],
    "ids of an ended row are taken in": [
        (Scheduler, "_decide", {"live = ~dead & (flags & ENDING == 0)": "live = ~dead"}),
    ],
    "the prompt's last token is taken from the cache": [
        (Batch, "start", {"known[:-1] if whole": "known if whole"}),
    ],
    "a prefix is not locked before its tail is allocated": [
        (Batch, "start", {"cache.lock(match, ": "cache.lock(cache.match(known[:0], request.space), "}),
    ],
    "a duplicate page is freed while the row still uses it": [
        (
            Batch,
            "publish",
            {
                "rows.page_table[slot, columns] = kept[columns]": "pass",
                "self._update(slot, columns, kept[columns])": "pass",
            },
        ),
    ],
    "a request gives way to a prefix that is only held": [
        (Groups, "missing", {"while self._holding and ": "while False and "}),
    ],
    "an ended row gives its pages back twice": [
        (
            Batch,
            "_leave",
            {"request.has_pages, request.tree_pages, rows.page_end[slot] = False, 0, 0": "pass"},
        ),
    ],
}


def test_the_scripts_pass_as_long_as_nothing_is_broken():
    assert first_failure() == ""


@pytest.mark.parametrize("name", MUTANTS)
def test_a_broken_promise_is_noticed(name, monkeypatch):
    for owner, function, changes in MUTANTS[name]:
        broken = mutated(getattr(owner, function), changes)
        monkeypatch.setattr(owner, function, broken)
        if owner is plan_builder and hasattr(scheduler, function):
            monkeypatch.setattr(scheduler, function, broken)
    assert first_failure(), "nothing went red"


def test_every_flag_is_a_bit_of_its_own():
    flags = [
        rows.ENDING,
        rows.PREEMPTED,
        rows.KEPT,
        rows.PREFILLING,
        rows.FULL,
        rows.CONSTRAINED,
        rows.ADJUSTED,
        rows.DRAWN,
    ]
    assert sum(flags) == 255 and len(set(flags)) == 8
