"""The parser for tool calls between marks, which the formats of models fill in."""

from __future__ import annotations

from collections.abc import Callable, Collection

from gapless.tokenizer_manager.openai.tool_parser import (
    SPACE,
    Call,
    Item,
    ObjectScanner,
    ToolParser,
    overlap,
    read_call,
)


class MarkedParser(ToolParser):
    """Text, then calls: an opener, JSON objects and perhaps a closer, then text again.

    Space beside a call belongs to neither side. A closer may be missing, an opener that no object follows is text.
    """

    opener = ""
    closer = ""
    before = SPACE  # characters that may stand between the opener and a call
    between = SPACE  # between a call and the next one or the closer
    starts_open = False  # the output begins as if behind an opener

    def __init__(self, names: Collection[str]) -> None:
        super().__init__(names)
        self._held = ""  # what is not yet part of an item
        self._at = 0  # how much of it has been read, where that is remembered
        self._start = 0  # of the object in it
        self._scanner = ObjectScanner()
        self._items: list[Item] = []
        self._beside_call = False  # nothing but space since the last call
        self._state: Callable[[], bool] = self._before if self.starts_open else self._text

    def push(self, text: str) -> list[Item]:
        self._held += text
        while self._held and self._state():  # a state is true when it has handed over to another
            pass
        return self._taken()

    def finish(self) -> list[Item]:
        is_text = self._state != self._after and not (self._beside_call and self._held.isspace())
        self._show(self._held if is_text else "")
        self._held = ""
        return self._taken()

    def object_at(self, text: str, at: int) -> int | None:
        """Where the object of a call begins whose first character is at `at`; -1: that is to be seen; None: nowhere."""
        return at if text[at] == "{" else None

    def read(self, text: str) -> Call | None:
        """The call of an object."""
        return read_call(text, self.names)

    def _text(self) -> bool:
        """Before an opener; its beginning is held back, and the space before it."""
        held = self._held
        found = held.find(self.opener) if self.opener else -1
        end = found if found >= 0 else len(held) - overlap(held, self.opener)
        shown = held[:end].rstrip(SPACE)
        self._show(shown)
        self._held = held[len(shown) :]
        if found < 0:
            return False
        self._at = found - len(shown) + len(self.opener)
        return self._go(self._before)

    def _before(self) -> bool:
        """Behind an opener."""
        at = _skip(self._held, self._at, self.before)
        start = -1 if at == len(self._held) else self.object_at(self._held, at)
        if start is None:  # the opener was none; another may follow
            self._show(self._held[: self._at])
            self._held = self._held[self._at :]
            return self._go(self._text)
        return start >= 0 and self._begin(start)

    def _begin(self, start: int) -> bool:
        self._start = self._at = start
        self._scanner = ObjectScanner()
        return self._go(self._object)

    def _object(self) -> bool:
        """Within an object."""
        end = self._scanner.end(self._held, self._at)
        if end < 0:
            self._at = len(self._held)
            return False
        call = self.read(self._held[self._start : end])
        if call is None:
            self._show(self._held[:end])
        else:
            self._items.append(call)
            self._beside_call = True
        self._held = self._held[end:]
        return self._go(self._text if call is None else self._after)

    def _after(self) -> bool:
        """Behind a call."""
        held, at = self._held, _skip(self._held, 0, self.between)
        if at == len(held):
            return False
        if held[at] == "{":
            self._held = held[at:]
            return self._begin(0)
        for mark, state in ((self.closer, self._text), (self.opener, self._before)):
            if mark and held.startswith(mark, at):
                self._at = at + len(mark)
                if mark == self.closer:
                    self._held, self._at = held[self._at :], 0
                return self._go(state)
        if any(mark.startswith(held[at:]) for mark in (self.closer, self.opener)):
            return False
        return self._go(self._text)

    def _go(self, state: Callable[[], bool]) -> bool:
        self._state = state
        return True

    def _show(self, text: str) -> None:
        if text:
            self._items.append(text)
            self._beside_call = self._beside_call and text.isspace()

    def _taken(self) -> list[Item]:
        items, self._items = self._items, []
        return items


def _skip(text: str, at: int, characters: str) -> int:
    while at < len(text) and text[at] in characters:
        at += 1
    return at
