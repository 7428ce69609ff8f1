"""Stop strings, found while text flows: the automaton of Aho and Corasick, "Efficient string matching: an aid to
bibliographic search" (CACM 1975).

Its state after each character is the longest suffix of the text that is a prefix of some stop string: exactly what
must be held back, no more. A character costs a bounded number of steps (amortised), however many stops there are.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple


class Match(NamedTuple):
    """Text up to the stop string, and the stop string."""

    text: str
    stop: str


class StopAutomaton:
    """Node 0 is the root; node n stands for a prefix of a stop string, `depth[n]` characters long."""

    def __init__(self, stops: tuple[str, ...]) -> None:
        self.children: list[dict[str, int]] = [{}]
        self.depth = [0]
        self.fail = [0]  # the node of the longest proper suffix that is a prefix of some stop
        self.found: list[str | None] = [None]  # the longest stop that ends here
        for stop in stops:
            self._add(stop)
        self._link()

    def _add(self, stop: str) -> None:
        node = 0
        for char in stop:
            if char not in self.children[node]:
                self.children[node][char] = len(self.children)
                self.children.append({})
                self.depth.append(self.depth[node] + 1)
                self.fail.append(0)
                self.found.append(None)
            node = self.children[node][char]
        self.found[node] = stop

    def _link(self) -> None:
        """Breadth first: a node's suffixes are shorter, so they are linked before it."""
        queue = list(self.children[0].values())
        for node in queue:
            for char, child in self.children[node].items():
                self.fail[child] = self.step(self.fail[node], char)
                if self.found[child] is None:
                    self.found[child] = self.found[self.fail[child]]
                queue.append(child)

    def step(self, node: int, char: str) -> int:
        while (child := self.children[node].get(char)) is None:
            if node == 0:
                return 0
            node = self.fail[node]
        return child


# Clients send the same stops with every request. The longest that are taken make a quarter of a megabyte.
automaton = lru_cache(maxsize=64)(StopAutomaton)


class StopMatcher:
    """Passes text on until a stop string is complete.

    The match that is completed first counts; of several completed by the same character the longest, which starts
    first. So the result depends on the text alone, not on how it is cut into pieces.
    """

    __slots__ = ("_automaton", "_held", "_node")

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._automaton = automaton(stops)
        self._node = 0
        self._held = ""  # as long as the depth of `_node`

    def push(self, text: str, *, too_early: bool = False) -> str | Match:
        """What of the text so far can be shown now, or the match. Nothing may be pushed after a match.

        A stop string that is completed in a text that comes `too_early` is none; one that only begins there is.
        """
        machine, node = self._automaton, self._node
        step, found = machine.step, machine.found
        pending = self._held + text
        for position, char in enumerate(text, len(self._held) + 1):
            node = step(node, char)
            if (stop := found[node]) is not None and not too_early:
                return Match(pending[: position - len(stop)], stop)
        while node and not machine.children[node]:  # all of a stop that came too early: nothing can follow it
            node = machine.fail[node]
        self._node = node
        shown = len(pending) - machine.depth[node]
        self._held = pending[shown:]
        return pending[:shown]

    def flush(self) -> str:
        """The end of the output: what was held back is no stop string."""
        held, self._held, self._node = self._held, "", 0
        return held
