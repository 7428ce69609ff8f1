"""Stop strings: against a reference that looks at the whole text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gapless.detokenizer.stop import Match, StopAutomaton, StopMatcher, automaton
from gapless.runtime.core.sampling import MAX_STOP_CHARS

STOPS = st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=4).map(tuple)
CHUNKS = st.lists(st.text("abc", max_size=6), max_size=12)


def first_match(text: str, stops: tuple[str, ...]) -> tuple[str, str] | None:
    """(text before, stop) of the match completed first, the longest where several are."""
    for end in range(1, len(text) + 1):
        if ending := [s for s in stops if text[:end].endswith(s)]:
            stop = max(ending, key=len)
            return text[: end - len(stop)], stop
    return None


def run(chunks: list[str], stops: tuple[str, ...]) -> tuple[list[str], str | None]:
    """What each chunk made visible, and the stop."""
    matcher, shown = StopMatcher(stops), []
    for chunk in chunks:
        result = matcher.push(chunk)
        if isinstance(result, Match):
            return [*shown, result.text], result.stop
        shown.append(result)
    return [*shown, matcher.flush()], None


@given(CHUNKS, STOPS)
def test_any_cut_gives_the_reference(chunks: list[str], stops: tuple[str, ...]) -> None:
    shown, stop = run(chunks, stops)
    text = "".join(chunks)
    assert ("".join(shown), stop) == (first_match(text, stops) or (text, None))


@given(CHUNKS, STOPS)
def test_holds_exactly_the_longest_suffix_that_starts_a_stop(
    chunks: list[str], stops: tuple[str, ...]
) -> None:
    matcher, shown, text = StopMatcher(stops), "", ""
    for chunk in chunks:
        text += chunk
        result = matcher.push(chunk)
        if isinstance(result, Match):
            return
        shown += result
        held = max(n for stop in stops for n in range(len(stop)) if text.endswith(stop[:n]))
        assert shown == text[: len(text) - held]


@pytest.mark.parametrize("chunks", [["a", "EN", "D#", "#b"], ["aEND##b"], list("aEND##b")])
def test_no_part_of_a_stop_string_shows(chunks: list[str]) -> None:
    shown, stop = run(chunks, ("END##",))
    assert ("".join(shown), stop) == ("a", "END##")


@given(CHUNKS, CHUNKS, STOPS)
def test_stops_completed_too_early_are_none_and_what_follows_decides(
    early: list[str], later: list[str], stops: tuple[str, ...]
) -> None:
    """The reference looks for matches that end after the early text; they may begin in it."""
    matcher, shown, text = StopMatcher(stops), "", ""
    for chunk in early:
        result = matcher.push(chunk, too_early=True)
        assert isinstance(result, str)
        shown, text = shown + result, text + chunk
        held = max(n for stop in stops for n in range(len(stop)) if text.endswith(stop[:n]))
        assert shown == text[: len(text) - held]
    everything = text + "".join(later)
    ends = [n for n in range(len(text) + 1, len(everything) + 1) if everything[:n].endswith(stops)]
    want = (everything, None)
    if ends:
        stop = max((s for s in stops if everything[: ends[0]].endswith(s)), key=len)
        want = (everything[: ends[0] - len(stop)], stop)
    for chunk in later:
        result = matcher.push(chunk)
        if isinstance(result, Match):
            assert (shown + result.text, result.stop) == want
            return
        shown += result
    assert (shown + matcher.flush(), None) == want


def test_a_long_stop_string_does_not_hold_ordinary_text_back() -> None:
    words = [f"word {n} " for n in range(50)]
    assert run(words, ("#" * 40,))[0] == [*words, ""]


def test_text_held_for_an_outer_stop_is_released_by_an_inner_match() -> None:
    assert run(["xab", "c"], ("abcd", "bc")) == (["x", "a"], "bc")


def test_steps_for_a_character_do_not_grow_with_the_number_of_stops() -> None:
    """A character goes at most one node deeper, and each look back goes at least one node up."""
    machine, looks = StopAutomaton(tuple("a" * n + "b" for n in range(1, 32))), 0

    class Counting(dict[str, int]):
        def get(self, key: str, default: int | None = None) -> int | None:  # type: ignore[override]
            nonlocal looks
            looks += 1
            return super().get(key, default)

    machine.children = [Counting(children) for children in machine.children]
    text, node = "a" * 30 + "ac" * 500 + "a" * 1000, 0
    for char in text:
        node = machine.step(node, char)
    assert machine.depth[node] == 31
    assert looks <= 2 * len(text)


def test_what_is_remembered_of_stops_is_bounded() -> None:
    """A client that sends other stops each time, as long as they may be, fills no memory: a node is about 250 bytes."""
    assert automaton.cache_parameters()["maxsize"] * MAX_STOP_CHARS <= 1 << 17
