"""GBNF (llama.cpp's grammars, in which SGLang's `ebnf` is written, too) as a Lark grammar for llguidance.

A rule that does not lead back to itself becomes a terminal, that is, one regular expression: there every way to read
a text counts, as in GBNF. Only what is recursive becomes a rule of the parser, whose terminals match the longest text.
"""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

_TOKEN = re.compile(
    r"""(?P<space>\s+|\#[^\n]*)|(?P<define>::=)|(?P<name>[\w-]+)|(?P<string>"(?:[^"\\\n]|\\.)*")"""
    r"""|(?P<set>\[(?:[^\]\\\n]|\\.)*\])|(?P<count>\{\s*\d+\s*(?:,\s*\d*\s*)?\})|(?P<mark>[|()*+?.])""",
    re.ASCII,
)
_CHARACTER = re.compile(
    r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|([nrt\"\\\[\]^/-]))|[^\\]", re.DOTALL
)
_ESCAPES = {"n": "\n", "r": "\r", "t": "\t"}
_COUNTS = {"*": "*", "+": "+", "?": "?"}


class GrammarSyntaxError(ValueError):
    """The message names the line."""


@dataclass
class _Rule:
    parts: list[str]  # Lark, but for the names of other rules, which stand as "\0name\0"
    uses: list[str]


def gbnf_to_lark(text: str) -> str:
    """`text`, whose first symbol is `root`, as rules of Lark; raises GrammarSyntaxError."""
    rules = _Parser(text).rules()
    if "root" not in rules:
        raise GrammarSyntaxError("there is no rule `root`")
    for name, rule in rules.items():
        if unknown := next((used for used in rule.uses if used not in rules), None):
            raise GrammarSyntaxError(f"rule `{name}` uses `{unknown}`, which is not defined")
    terminal = _terminals(rules)
    names = {name: f"{'T' if name in terminal else 'r'}{i}" for i, name in enumerate(rules)}
    lines = [f"start: {names['root']}"]
    for name, rule in rules.items():
        body = re.sub("\0(.*?)\0", lambda match: names[match[1]], " ".join(rule.parts))
        lines.append(f"{names[name]}: {body}")
    return "\n".join(lines) + "\n"


def _terminals(rules: dict[str, _Rule]) -> set[str]:
    """Rules from which no chain of uses leads into a cycle."""
    users: dict[str, list[str]] = {name: [] for name in rules}
    for name, rule in rules.items():
        for used in rule.uses:
            users[used].append(name)
    open_uses = {name: len(rule.uses) for name, rule in rules.items()}
    done: set[str] = set()
    ready = deque(name for name, count in open_uses.items() if not count)
    while ready:
        done.add(name := ready.popleft())
        for user in users[name]:
            open_uses[user] -= 1
            if not open_uses[user]:
                ready.append(user)
    return done


class _Parser:
    """Goes over the tokens once. A rule ends where the next one begins, so that lines may be broken anywhere."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._tokens = list(self._scan())
        self._at = 0

    def rules(self) -> dict[str, _Rule]:
        rules: dict[str, _Rule] = {}
        while self._at < len(self._tokens):
            kind, name, place = self._tokens[self._at]
            if not (kind == "name" and self._begins_rule()):
                raise self._error("a rule `name ::= ...` should begin here", place)
            if name in rules:
                raise self._error(f"rule `{name}` is defined twice", place)
            self._at += 2
            rules[name] = self._body()
        return rules

    def _body(self) -> _Rule:
        parts: list[str] = []
        uses: list[str] = []
        groups: list[int] = []  # places of the open ones
        empty, repeatable = True, False  # nothing since the last "|" or "("; the last part is an item
        while self._at < len(self._tokens) and not self._begins_rule():
            kind, token, place = self._tokens[self._at]
            self._at += 1
            if token in ("|", ")"):
                parts += ['""'] * empty
                if token == ")" and not groups:
                    raise self._error("this `)` closes nothing", place)
                parts.append(token)
                groups[-1:] = [] if token == ")" else groups[-1:]
                empty = token == "|"
                repeatable = token == ")"
            elif token == "(":
                groups.append(place)
                parts.append(token)
                empty, repeatable = True, False
            elif kind == "count" or token in _COUNTS:
                if not repeatable:
                    raise self._error(f"`{token}` repeats nothing", place)
                parts[-1] += re.sub(r"\s", "", token)
                repeatable = False
            else:
                parts.append(self._item(kind, token, place))
                uses += [token] * (kind == "name")
                empty, repeatable = False, True
        if groups:
            raise self._error("this `(` is not closed", groups[-1])
        return _Rule(parts + ['""'] * empty, uses)

    def _item(self, kind: str, token: str, place: int) -> str:
        if kind == "name":
            return f"\0{token}\0"
        if kind == "string":
            return json.dumps("".join(char for char, _ in self._characters(token[1:-1], place)))
        if kind == "set":
            return self._set(token[1:-1], place)
        if token == ".":
            return "/(?s:.)/"
        raise self._error(f"`{token}` should not stand here", place)

    def _set(self, inner: str, place: int) -> str:
        """A set of characters as a regular expression."""
        negated = inner.startswith("^")
        characters = list(self._characters(inner[negated:], place))
        if not characters:
            raise self._error("a set of characters is empty", place)
        items, i = "", 0
        while i < len(characters):
            low = high = ord(characters[i][0])
            if i + 2 < len(characters) and characters[i + 1] == ("-", False):
                high = ord(characters[i + 2][0])
                i += 2
            if high < low:
                raise self._error("a range of characters ends before it begins", place)
            items += f"\\x{{{low:x}}}-\\x{{{high:x}}}"
            i += 1
        return f"/[{'^' * negated}{items}]/"

    def _characters(self, text: str, place: int) -> Iterator[tuple[str, bool]]:
        """(character, whether it was escaped) of what stands between quotes or brackets."""
        at = 0
        while at < len(text):
            match = _CHARACTER.match(text, at)
            if match is None:
                raise self._error(f"unknown escape `{text[at : at + 2]}`", place)
            code, letter = match[1] or match[2] or match[3], match[4]
            if code:
                number = int(code, 16)
                if number > 0x10FFFF or 0xD800 <= number < 0xE000:
                    raise self._error(f"`{match[0]}` is no character", place)
                yield chr(number), True
            elif letter:
                yield _ESCAPES.get(letter, letter), True
            else:
                yield match[0], False
            at = match.end()

    def _begins_rule(self) -> bool:
        following = self._tokens[self._at + 1 : self._at + 2]
        return bool(following) and following[0][0] == "define"

    def _scan(self) -> Iterator[tuple[str, str, int]]:
        """(kind, text, place) of each token but spaces and comments."""
        at = 0
        while at < len(self._text):
            match = _TOKEN.match(self._text, at)
            if match is None:
                raise self._error(f"`{self._text[at]}` should not stand here", at)
            assert match.lastgroup is not None
            if match.lastgroup != "space":
                yield match.lastgroup, match[0], at
            at = match.end()

    def _error(self, message: str, place: int) -> GrammarSyntaxError:
        return GrammarSyntaxError(f"line {self._text.count(chr(10), 0, place) + 1}: {message}")
