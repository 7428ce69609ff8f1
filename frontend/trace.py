"""What a program would append, without a model."""

from __future__ import annotations

import reprlib
from collections.abc import Iterator
from typing import Any

from gapless.frontend.branch import Branch, Fork, Variable
from gapless.frontend.errors import ProgramError, Site
from gapless.frontend.expressions import Gen, Leaf, RoleBegin, RoleEnd, ScopeBegin, ScopeEnd, Select
from gapless.frontend.run import Run

_MAX_STEPS = 10_000  # a program that goes on until the model says something never ends here
_SHOWN_CHARS = 60


class TracedBranch(Branch):
    """Keeps what is appended. Values are stand-ins: the variable's name in braces."""

    def __init__(self, run: Run, label: str = "") -> None:
        super().__init__(run, label)
        self.appended: list[Leaf | Fork] = []

    def append(self, what: Leaf | Fork, site: Site) -> None:
        if len(self.appended) >= _MAX_STEPS:
            raise ProgramError(f"{self.program}: the trace was ended after {_MAX_STEPS} steps")
        last = self.appended[-1] if self.appended else None
        if isinstance(what, str) and isinstance(last, str):
            self.appended[-1] = last + what
        else:
            self.appended.append(what)
        super().append(what, site)

    async def _generate(self, gen: Gen, variable: Variable) -> None:
        text = _stand_in(gen)
        self._say(text)
        variable.parts.append(text)
        count = gen.params.get("n", 1)
        variable.finish(text if count == 1 else [text] * count, {})

    async def _select(self, select: Select, variable: Variable) -> None:
        self._say(_stand_in(select))
        variable.parts.append(_stand_in(select))
        variable.finish(_stand_in(select), {})

    async def _commit(self, branches: int) -> None:
        """There is nobody to commit to."""

    async def _role_text(self, role: str) -> tuple[str, str]:
        return "", ""


class Trace:
    """A tree of a program's steps; `str` draws it. Its forks say how much text and how many calls they share.

    `error`: why the function did not come to its end, or None.
    """

    def __init__(self, program: str, root: TracedBranch, error: ProgramError | None) -> None:
        self.program, self.root, self.error = program, root, error

    def __str__(self) -> str:
        lines = [self.program, *_draw(self.root, 0, 0)]
        return "\n".join(lines if self.error is None else [*lines, f"ended by: {self.error}"])


def _draw(branch: TracedBranch, chars: int, calls: int) -> Iterator[str]:
    """Lines for the steps of a branch that shares so many characters and calls with others."""
    for place, what in enumerate(branch.appended):
        last = place == len(branch.appended) - 1
        head, below = ("└─ ", "   ") if last else ("├─ ", "│  ")
        if isinstance(what, Fork):
            yield f"{head}fork of {len(what.branches)} that share {chars} characters and {calls} calls"
            for number, child in enumerate(what.branches):
                assert isinstance(child, TracedBranch)
                end = number == len(what.branches) - 1
                yield below + ("└─ " if end else "├─ ") + f"fork {number}"
                for line in _draw(child, chars, calls):
                    yield below + ("   " if end else "│  ") + line
            continue
        yield head + _describe(what)
        chars += len(what) if isinstance(what, str) else 0
        calls += isinstance(what, (Gen, Select))


def _describe(what: Leaf) -> str:
    match what:
        case str(text):
            return f"text of {len(text)}: {_short(text)}"
        case Gen(name, params):
            return ", ".join([f"gen {name or ''}".rstrip(), *(f"{k}={_short(v)}" for k, v in params.items())])
        case Select(name, choices, method):
            return f"select {name or ''}".rstrip() + f" of {_short(list(choices))} by {method}"
        case RoleBegin(role):
            return f"{role} begins"
        case RoleEnd(role):
            return f"{role} ends"
        case ScopeBegin(name):
            return f"variable {name} begins"
        case ScopeEnd(name):
            return f"variable {name} ends"
        case _:
            raise AssertionError(f"not a step: {what!r}")


def _stand_in(call: Gen | Select) -> str:
    return f"{{{call.name or 'a call'}}}"


def _short(value: Any) -> str:
    short = reprlib.Repr()
    short.maxstring = _SHOWN_CHARS
    return short.repr(value)
