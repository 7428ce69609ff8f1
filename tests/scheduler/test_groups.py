"""Held prefixes: kept while there is room, and in nobody's way when there is none; the books balance throughout."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from differential import Runner
from hypothesis import given, settings
from hypothesis import strategies as st

from gapless.radix_cache.cache import PrefixCache
from gapless.radix_cache.namespace import Namespace
from gapless.runtime.core.config import ServerConfig
from gapless.runtime.core.messages import Finish, ReleaseGroup
from gapless.runtime.scheduler import groups
from gapless.runtime.scheduler.groups import LEASE_S, Group, Groups

PREFIX = [(5 * i) % 251 for i in range(16)]
HOLD = {"group": "g", "hold": True}


@pytest.fixture(params=[False, True], ids=["overlap", "no-overlap"])
def make(request):
    def make(**options):
        defaults = {"model_path": "toy", "page_size": 1, "max_running_requests": 8, "context_length": 512}
        return Runner(ServerConfig(**defaults | options, disable_overlap_schedule=request.param))

    return make


def commit(runner: Runner, uid: int, prompt: list[int], **more: Any) -> None:
    """Computes the prompt and generates nothing; all is done when it returns."""
    runner.submit(uid, prompt, 0, **HOLD | more)
    rest(runner)
    assert runner.seen[uid].finish == Finish.LENGTH and runner.seen[uid].ids == []


def rest(runner: Runner) -> None:
    """Turns until nothing is alive; what is held stays."""
    while runner.turn() or not runner.scheduler.is_idle:
        pass
    assert runner.scheduler.audit() == ""


def cached(runner: Runner, prompt: list[int]) -> int:
    """How many pages of the prompt are cached."""
    cache = runner.scheduler.batch.cache
    return cache.match(np.array(prompt, np.int32), Namespace(weights=cache.version)).length


def press(runner: Runner, uid: int, count: int) -> None:
    """Other prompts of 16 tokens, one after the other, each of which the cache keeps where it can."""
    for number in range(uid, uid + count):
        runner.submit(number, [number % 251, *range(100, 115)], 1)
        rest(runner)


@pytest.mark.parametrize("hold", [False, True])
def test_a_held_prefix_stays_where_others_are_evicted(make, hold):
    runner = make(max_total_tokens=64)
    commit(runner, 1, PREFIX, hold=hold)
    press(runner, 10, 8)
    assert cached(runner, PREFIX) == (16 if hold else 0)
    runner.submit(2, [*PREFIX, 9], 4, group="g")
    runner.finish()
    assert runner.seen[2].cached_tokens == (16 if hold else 0)
    assert runner.seen[2].ids == runner.expected([*PREFIX, 9], 4)


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("max_new_tokens", [0, 1, 5])
def test_all_whole_pages_of_the_prompt_are_held(make, page_size, max_new_tokens):
    """The last one, too, where the prompt ends with it; also where the request ends in the step that computes it."""
    runner = make(page_size=page_size, max_total_tokens=256)
    for uid, length in enumerate((32, 35), 1):
        prompt = [uid, *range(length - 1)]
        runner.submit(uid, prompt, max_new_tokens, group=f"g{uid}", hold=True)
        rest(runner)
        assert cached(runner, prompt) == length // page_size
    assert runner.scheduler.batch.groups.pages == 32 // page_size + 35 // page_size
    runner.finish()


def test_a_prompt_of_less_than_a_page_holds_nothing(make):
    runner = make(page_size=16)
    commit(runner, 1, PREFIX[:15])
    assert runner.scheduler.batch.groups.pages == 0


def test_growth_takes_what_is_held_before_anyone_is_preempted(make):
    runner = make(max_total_tokens=64)
    commit(runner, 1, PREFIX)
    for uid in (2, 3):
        runner.submit(uid, [uid, 1, 2, 3], 26)
    rest(runner)
    assert runner.scheduler.admission.preemption.count == 0
    assert runner.scheduler.batch.groups.pages == 0
    for uid in (2, 3):
        assert runner.seen[uid].ids == runner.expected([uid, 1, 2, 3], 26)
    runner.finish()


def test_a_prompt_takes_what_is_held_before_it_waits(make):
    """The oldest hold goes, as many as are needed, while another request runs."""
    runner = make(max_total_tokens=64)
    for uid, first in enumerate((201, 202), 1):
        commit(runner, uid, [first, *PREFIX[1:]], group=f"g{uid}")
    runner.submit(3, [3], 8)
    runner.turn()
    runner.submit(4, [4, *range(35)], 1)
    runner.turn()
    assert not runner.scheduler.admission.waiting
    rest(runner)
    assert [cached(runner, [first, *PREFIX[1:]]) for first in (201, 202)] == [0, 16]
    runner.finish()


def test_who_waits_for_pages_gets_those_of_a_new_hold_at_once(make):
    """Though another request runs on, so that it is not tried again at each step whether they fit."""
    runner = make(max_total_tokens=64, chunked_prefill_size=8)
    runner.submit(1, [1, *range(29)], 0, **HOLD)
    runner.submit(2, [2], 25)
    runner.turn()
    runner.submit(3, [3, *range(100, 139)], 1)
    while not runner.seen[1].finish:
        runner.turn()
    assert runner.scheduler.admission.waiting
    for _ in range(3):
        runner.turn()
    assert not runner.scheduler.admission.waiting and not runner.seen[2].finish
    rest(runner)
    assert runner.scheduler.batch.groups.pages == 0


def test_a_released_prefix_can_be_evicted(make):
    runner = make(max_total_tokens=64)
    commit(runner, 1, PREFIX)
    runner.scheduler.handle([ReleaseGroup("other"), ReleaseGroup("g"), ReleaseGroup("g")])
    assert runner.scheduler.batch.groups.pages == 0
    assert cached(runner, PREFIX) == 16
    press(runner, 10, 8)
    assert cached(runner, PREFIX) == 0
    runner.finish()


@pytest.mark.parametrize("turns", [0, 1, 2, 3])
def test_a_group_that_is_released_under_its_requests_holds_nothing(make, turns):
    """Also where one waits; a request that comes later makes the group anew."""
    runner = make(max_total_tokens=128, max_running_requests=1)
    for uid in (1, 2):
        runner.submit(uid, [uid, *PREFIX], 3, **HOLD)
    for _ in range(turns):
        runner.turn()
    runner.scheduler.handle([ReleaseGroup("g")])
    runner.submit(3, [3, *PREFIX], 3, **HOLD)
    rest(runner)
    assert runner.scheduler.batch.groups.pages == 17
    runner.scheduler.handle([ReleaseGroup("g")])
    assert runner.scheduler.batch.groups.pages == 0
    runner.finish()


def test_a_lease_ends_when_the_group_has_had_no_request_for_long(make):
    runner, now = make(), 0.0
    held = runner.scheduler.batch.groups
    held.clock = lambda: now
    commit(runner, 1, PREFIX)
    commit(runner, 2, [9, *PREFIX], group="other")
    now = LEASE_S - 1
    runner.submit(3, [*PREFIX, 1], 4, group="g")
    rest(runner)
    assert held.pages == 33
    now = LEASE_S
    runner.scheduler.handle([])
    assert held.pages == 16
    now = 2 * LEASE_S - 2
    runner.scheduler.handle([])
    assert held.pages == 16
    now = 2 * LEASE_S - 1
    runner.scheduler.handle([])
    assert held.pages == 0
    runner.finish()


def test_a_lease_does_not_end_while_a_request_of_the_group_waits_or_runs(make):
    runner, now = make(max_running_requests=1), 0.0
    held = runner.scheduler.batch.groups
    held.clock = lambda: now
    commit(runner, 1, PREFIX)
    runner.submit(2, [2], 20)
    runner.turn()
    runner.submit(3, [*PREFIX, 1], 20, group="g")
    while not runner.seen[3].finish:
        now += LEASE_S
        runner.scheduler.handle([])
        assert held.pages == 16
        runner.turn()
    rest(runner)
    now += LEASE_S
    runner.scheduler.handle([])
    assert held.pages == 0
    runner.finish()


def test_a_flush_is_not_refused_for_what_is_held(make):
    runner = make()
    commit(runner, 1, PREFIX)
    answer = runner.flush()
    assert answer.done and answer.pages == 16
    assert cached(runner, PREFIX) == runner.scheduler.batch.groups.pages == 0
    commit(runner, 2, PREFIX)
    assert cached(runner, PREFIX) == 16
    runner.finish()


def test_what_ends_after_a_flush_holds_nothing(make):
    """It was told to end before, so that nothing was alive; its prefix is of no use any more."""
    runner = make()
    runner.submit(1, PREFIX, 20, **HOLD)
    while not runner.seen[1].ids:
        runner.turn()
    runner.abort(1)
    assert runner.flush().done
    rest(runner)
    assert runner.scheduler.batch.groups.pages == 0
    runner.finish()


def test_what_an_aborted_request_had_computed_is_held_only_where_it_is_the_whole_prompt(make):
    runner = make(chunked_prefill_size=8)
    runner.submit(1, PREFIX, 20, **HOLD)
    runner.turn()
    runner.abort(1)
    rest(runner)
    assert runner.scheduler.batch.groups.pages == 0
    runner.finish()


def test_holds_take_at_most_half_of_the_pool(make):
    """The oldest go; and one that is larger by itself is none."""
    runner = make(max_total_tokens=64)
    prompts = [[uid, *PREFIX[1:]] for uid in range(5)]
    for uid, prompt in enumerate(prompts, 1):
        commit(runner, uid, prompt)
        assert runner.scheduler.batch.groups.pages == min(16 * uid, 32)
    press(runner, 10, 8)
    assert [cached(runner, prompt) for prompt in prompts] == [0, 0, 0, 16, 16]
    commit(runner, 20, [*range(33)], group="large")
    assert runner.scheduler.batch.groups.pages == 0
    runner.finish()


def test_what_several_hold_counts_once(make):
    """Holds that begin each other or fork, some of them in one node of the tree at first."""
    runner = make(max_total_tokens=64)
    held = runner.scheduler.batch.groups
    for uid, (group, prompt) in enumerate(
        [("a", PREFIX), ("b", PREFIX), ("b", PREFIX), ("c", PREFIX[:8]), ("d", [*PREFIX[:8], 1, 2])], 1
    ):
        commit(runner, uid, prompt, group=group)
    assert held.pages == 18
    for group, left in (("a", 18), ("d", 16), ("b", 8), ("c", 0)):
        runner.scheduler.handle([ReleaseGroup(group)])
        assert held.pages == runner.scheduler.batch.cache.used_pages == left
    runner.finish()


def test_there_are_only_so_many_holds(make, monkeypatch):
    monkeypatch.setattr(groups, "MOST_HOLDS", 3)
    runner = make()
    for uid in range(1, 6):
        commit(runner, uid, PREFIX[: 2 * uid], group=f"g{uid}")
    held = runner.scheduler.batch.groups
    for uid, left in ((5, 8), (4, 6), (3, 0)):
        runner.scheduler.handle([ReleaseGroup(f"g{uid}")])
        assert held.pages == left
    runner.finish()


def test_nothing_is_left_of_a_group_that_has_ended(make):
    runner = make()
    for uid in range(1, 9):
        runner.submit(uid, [uid, *PREFIX], 2, group=f"g{uid}", hold=uid % 2 == 0)
    runner.abort(7)
    runner.finish()
    held = runner.scheduler.batch.groups
    assert (held._named, held._holding, held._holds, held.pages) == ({}, {}, 0, 0)


def test_without_a_cache_nothing_is_held(make):
    runner = make(disable_radix_cache=True)
    commit(runner, 1, PREFIX)
    assert runner.scheduler.batch.groups.pages == runner.scheduler.batch.cache.used_pages == 0
    runner.finish()


SPACES = [Namespace(), Namespace(extra_key="x")]
OPERATIONS = st.one_of(
    st.tuples(st.just("join"), st.sampled_from("abc")),
    st.tuples(st.just("leave"), st.integers(0, 9)),
    st.tuples(
        st.just("hold"),
        st.tuples(
            st.integers(0, 9), st.lists(st.integers(0, 1), min_size=1, max_size=9), st.sampled_from(SPACES)
        ),
    ),
    st.tuples(st.just("release"), st.sampled_from("abc")),
    st.tuples(st.just("need"), st.integers(0, 20)),
    st.tuples(st.just("wait"), st.sampled_from([0.4 * LEASE_S, LEASE_S])),
    st.tuples(st.just("clear"), st.none()),
)


class Books:
    """Groups over a cache without requests, beside what they must hold, found by going through all of it."""

    def __init__(self) -> None:
        self.cache = PrefixCache(16, 1)
        self.groups, self.now = Groups(self.cache), 0.0
        self.groups.clock = lambda: self.now
        self.joined: list[Group] = []
        self.used: dict[Group, float] = {}  # the one used last comes last
        self.holds: dict[Group, list[tuple[int, ...]]] = {}

    def use(self, group: Group) -> None:
        self.used.pop(group, None)
        self.used[group] = self.now

    def pages(self) -> set[tuple[int, ...]]:
        """Each page as the path that ends with it."""
        paths = [path for held in self.holds.values() for path in held]
        return {path[:end] for path in paths for end in range(2, len(path) + 1)}

    def drop_oldest(self) -> None:
        group = next(group for group in self.used if self.holds.get(group))
        self.holds[group].pop(0)

    def join(self, name: str) -> None:
        group = self.groups.join(name)
        assert group is not None
        self.joined.append(group)
        self.use(group)

    def leave(self, index: int) -> None:
        if self.joined:
            group = self.joined.pop(index % len(self.joined))
            self.groups.leave(group)
            self.use(group)

    def hold(self, what: tuple[int, list[int], Namespace]) -> None:
        index, ids, space = what
        if not self.joined or len(ids) > self.cache.available:
            return
        group, path = self.joined[index % len(self.joined)], (SPACES.index(space), *ids)
        tokens = np.array(ids, np.int32)
        held = self.cache.lock(self.cache.match(tokens[:0], space))
        own = self.cache.take(len(ids))
        node, kept = self.cache.publish(tokens, own, space, held)
        self.cache.give_back(own[own != kept])
        self.groups.hold(group, tokens, space)
        self.cache.unlock(node)
        if not group.released and path not in self.holds.get(group, []):
            self.holds.setdefault(group, []).append(path)
            self.use(group)
            while len(self.pages()) > 8:
                self.drop_oldest()

    def release(self, name: str) -> None:
        self.groups.release(name)
        for group in self.holds:
            if group.name == name:
                self.holds[group] = []

    def need(self, pages: int) -> None:
        missing = self.groups.missing(pages)
        while any(self.holds.values()) and 16 - len(self.pages()) < pages:
            self.drop_oldest()
        assert missing == pages - (16 - len(self.pages()))

    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.groups.expire()
        for group, used in list(self.used.items()):
            if used <= self.now - LEASE_S and self.holds.get(group):
                if group.live:
                    self.use(group)
                else:
                    self.holds[group] = []

    def clear(self, _: None) -> None:
        self.groups.clear()
        self.holds.clear()


@settings(max_examples=300, deadline=None)
@given(st.lists(OPERATIONS, max_size=40))
def test_whatever_happens_exactly_what_is_held_is_protected(operations):
    books = Books()
    for name, argument in operations:
        getattr(books, name)(argument)
        held = books.pages()
        assert books.groups.pages == books.cache.used_pages == len(held)
        for group, paths in books.holds.items():
            assert len(group.holds) == len(paths)
        for path in held:
            match = books.cache.match(np.array(path[1:], np.int32), SPACES[path[0]])
            assert match.length == len(path) - 1
    for name in "abc":
        books.release(name)
    books.cache.check_idle()
    assert not list(books.groups._index.nodes())
