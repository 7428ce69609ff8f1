"""The workloads of `gapless bench cache`, and the oracle against a naive count."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gapless.bench.workloads import (
    WORKLOADS,
    Best,
    Call,
    best_possible,
    few_shot,
    multi_turn,
    tree_of_thought,
)


def call(prompt, answer=(0,), after=-1):
    return Call(np.array(prompt, np.int32), np.array(answer, np.int32), after, 0.0, 0)


def naive_best(calls, size):
    """The oracle with a set of all prefixes that were ever computed."""
    computed, cached = set(), 0
    for each in calls:
        prompt, text = each.prompt.tolist(), each.text.tolist()
        lengths = range(0, len(prompt), size)  # at least one token is left
        cached += max(length for length in lengths if length == 0 or tuple(text[:length]) in computed)
        computed |= {tuple(text[:length]) for length in range(size, len(text), size)}
    return Best(sum(len(each.prompt) for each in calls), cached, len(computed))


def test_nothing_is_cached_of_a_single_prompt():
    assert best_possible([call([1, 2, 3, 4, 5])], 2) == Best(5, 0, 2)


def test_whole_pages_are_shared_and_no_more():
    calls = [call([1, 2, 3, 4, 5, 6]), call([1, 2, 3, 4, 9, 9])]
    assert best_possible(calls, 2) == Best(12, 4, 4)
    assert best_possible(calls, 4) == Best(12, 4, 1)
    assert best_possible(calls, 5) == Best(12, 0, 2)


def test_a_repeated_prompt_still_computes_its_last_token():
    calls = [call([1, 2, 3, 4])] * 2
    assert best_possible(calls, 1) == Best(8, 3, 4)
    assert best_possible(calls, 2) == Best(8, 2, 2)
    assert best_possible(calls, 4) == Best(8, 0, 1)


def test_an_answer_is_cached_but_for_its_newest_token():
    first = call([1, 2], answer=[3, 4, 5])
    calls = [first, call([1, 2, 3, 4, 5, 6], after=0)]
    assert best_possible(calls, 2) == Best(8, 4, 3)
    assert best_possible(calls, 1) == Best(8, 4, 6)


@st.composite
def dependent_calls(draw):
    """Few ids and short prompts, so that much is shared; some go on with an earlier text."""
    ids = st.lists(st.integers(0, 1), min_size=1, max_size=6)
    calls = []
    for number in range(draw(st.integers(1, 8))):
        after = draw(st.integers(-1, number - 1))
        before = [] if after < 0 else calls[after].text.tolist()
        calls.append(call(before + draw(ids), draw(ids), after))
    return calls


@given(dependent_calls(), st.integers(1, 4))
def test_the_oracle_counts_as_the_naive_one(calls, size):
    assert best_possible(calls, size) == naive_best(calls, size)


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_workload_depends_on_its_seed_alone(name):
    def contents(seed):
        return [
            (each.prompt.tolist(), each.answer.tolist(), each.after, each.delay, each.priority)
            for each in WORKLOADS[name](seed)
        ]

    assert contents(1) == contents(1) != contents(2)


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_call_contains_the_answer_that_it_waits_for(name):
    calls = WORKLOADS[name](1)
    for number, each in enumerate(calls):
        assert -1 <= each.after < number
        if each.after >= 0:
            before = calls[each.after].text
            assert len(before) < len(each.prompt) and (each.prompt[: len(before)] == before).all()


@pytest.mark.parametrize("name", WORKLOADS)
def test_the_best_does_not_depend_on_the_order(name):
    """So the oracle, which takes the calls in one order, is right for every schedule."""
    calls = WORKLOADS[name](1)
    random = np.random.default_rng(0)
    order: list[int] = []
    ready = [number for number, each in enumerate(calls) if each.after < 0]
    while ready:
        order.append(ready.pop(int(random.integers(len(ready)))))
        ready += [number for number, each in enumerate(calls) if each.after == order[-1]]
    assert sorted(order) == list(range(len(calls)))
    assert best_possible([calls[number] for number in order], 16) == best_possible(calls, 16)


def test_a_conversation_grows_by_turns():
    calls = multi_turn(1, users=3, turns=2, text_len=5, answer_len=6)
    first = [each for each in calls if each.after < 0]
    assert len(calls) == 6 and len(first) == 3  # 2 to 2 turns each
    assert all((each.prompt[:128] == first[0].prompt[:128]).all() for each in calls)
    assert all(each.priority == calls[each.after].priority for each in calls if each.after >= 0)


def test_the_questions_of_a_task_share_its_examples_and_nothing_else():
    calls = few_shot(1, tasks=3, questions=5, examples_len=40, question_len=8, answer_len=4)
    prefixes = [each.prompt[:8].tobytes() for each in calls]
    assert sorted(map(prefixes.count, set(prefixes))) == [5, 5, 5]
    assert len({each.prompt.tobytes() for each in calls}) == 15
    assert prefixes != sorted(prefixes, key=prefixes.index)  # interleaved


def test_a_tree_branches_at_each_of_four_levels():
    calls = tree_of_thought(1, problems=2, branches=3, question_len=8, thought_len=6)
    assert len(calls) == 2 * (3 + 9 + 27 + 81)
    children = [sum(each.after == number for each in calls) for number in range(len(calls))]
    assert children.count(3) == 2 * (3 + 9 + 27) and children.count(0) == 2 * 81
    assert len({each.prompt.tobytes() for each in calls}) == 2 * (1 + 3 + 9 + 27)
