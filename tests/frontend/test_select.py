"""Which choice each method takes, on log probabilities made up for it, and from which token on choices are scored."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gapless.frontend.backends import select
from gapless.frontend.backends.base import BackendError
from gapless.frontend.backends.select import Tail, selected, shared_tokens

LENGTH, GREEDY, UNCONDITIONAL = select.METHODS


def chosen(method: str, *tails: Tail) -> int:
    names = [f"choice {i}" for i in range(len(tails))]
    result = selected(names, tails, method, {})
    assert len(result.scores) == len(tails)
    assert result.choice == names[result.index]
    assert result.scores[result.index] == max(result.scores)
    return result.index


def test_each_method_has_a_winner_of_its_own() -> None:
    """A's first token is the likeliest; B has many near-certain tokens at its end; C gains most from the prompt."""
    a = Tail((1, 2), (-0.5, -3.0), (0.0, -2.5))
    b = Tail((3, 4, 5, 6), (-2.0, -0.1, -0.1, -0.1), (0.0, -0.1, -0.1, -0.1))
    c = Tail((7, 8), (-1.5, -1.0), (0.0, -6.0))
    assert chosen(LENGTH, a, b, c) == 1
    assert chosen(GREEDY, a, b, c) == 0
    assert chosen(UNCONDITIONAL, a, b, c) == 2


def test_the_scores_are_the_methods() -> None:
    tails = [Tail((1, 2), (-1.0, -3.0), (0.0, -2.0)), Tail((1, 5), (-1.0, -0.5), (0.0, -0.5))]
    assert selected("ab", tails, LENGTH, {}).scores == (-2.0, -0.75)
    assert selected("ab", tails, UNCONDITIONAL, {}).scores == (-1.0, -0.5)
    assert selected("ab", tails, GREEDY, {}).scores == (1.0, 2.0)
    assert selected("ab", tails, LENGTH, {}).meta["normalized_prompt_logprobs"] == [-2.0, -0.75]


def test_greedy_compares_tokens_and_not_their_numbers() -> None:
    """Equal tokens have equal log probabilities but for rounding, which must not part them."""
    a = Tail((1, 2), (-1.0, -5.0))
    b = Tail((1, 3), (-1.0001, -0.1))
    c = Tail((9, 9), (-1.00005, 0.0))
    assert chosen(GREEDY, a, b, c) == 1


@pytest.mark.parametrize(("rest", "winner"), [(-0.5, 1), (-1.5, 0)])
def test_greedy_with_a_choice_that_another_one_begins_with(rest: float, winner: int) -> None:
    """What ends is compared by the mean of its tokens, here -1, with what goes on."""
    assert chosen(GREEDY, Tail((1, 2), (-0.5, -1.5)), Tail((1, 2, 3), (-0.5, -1.5, rest))) == winner


def test_the_first_of_equal_choices_wins() -> None:
    for method in select.METHODS:
        assert chosen(method, Tail((5,), (-2.0,), (0.0,)), *[Tail((1,), (-1.0,), (0.0,))] * 2) == 1


@pytest.mark.parametrize("method", select.METHODS)
def test_what_cannot_be_loses(method: str) -> None:
    impossible = Tail((1, 2), (-math.inf, -math.inf), (0.0, -math.inf))
    assert chosen(method, impossible, Tail((3,), (-50.0,), (0.0,))) == 1
    assert chosen(method, impossible, impossible) == 0


def test_an_unknown_method_is_named() -> None:
    with pytest.raises(BackendError, match=r"'best_of'.*token_length_normalized, greedy_token_selection"):
        select.check_choices(["a"], "best_of")
    with pytest.raises(BackendError, match="needs choices"):
        select.check_choices([], LENGTH)


@pytest.mark.parametrize(
    ("texts", "shared"),
    [
        ([[1, 2, 3], [1, 2, 4]], 2),
        ([[1, 2, 3], [1, 2, 3, 4]], 2),  # one begins with the other, whose last token is scored
        ([[1, 2], [1, 2, 3], [1, 2, 4]], 1),  # an empty choice is scored by the prompt's last token
        ([[1, 2, 3]] * 2, 2),
        ([[1, 7, 3], [1, 2, 3]], 1),  # a token across the border differs before the prompt's end
        ([[7], [8, 2]], 0),
        ([[7], [7, 2]], 0),
        ([[], [3]], 0),
        ([["a", "b"], ["a", "c"]], 1),
    ],
)
def test_how_much_is_shared(texts: list[list[int]], shared: int) -> None:
    assert shared_tokens(texts) == shared


@given(st.lists(st.lists(st.integers(0, 2), max_size=5), min_size=1, max_size=5))
def test_all_share_it_each_has_more_and_no_more_could_be_left_out(texts: list[list[int]]) -> None:
    shared = shared_tokens(texts)
    assert len({tuple(text[:shared]) for text in texts}) == 1
    if all(texts):
        assert all(len(text) > shared for text in texts)
        more = shared + 1
        assert len({tuple(text[:more]) for text in texts}) > 1 or any(len(text) == more for text in texts)
