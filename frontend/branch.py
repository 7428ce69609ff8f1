"""A program's state on the loop: its text, its variables, and the steps that will add to them.

Steps are taken in the order in which they were appended. Text is said at once where nothing is before it; a call of
the model starts when all text before it is known, and the function that appended it goes on meanwhile.
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass
from typing import Any

from gapless.frontend.backends.base import Message, Prompt
from gapless.frontend.errors import ProgramError, Site, program_error, unset
from gapless.frontend.expressions import Gen, Leaf, RoleBegin, RoleEnd, ScopeBegin, ScopeEnd, Select
from gapless.frontend.run import Run


class Variable:
    """A value to be, or why there is none. `parts`: its text as far as it has come."""

    __slots__ = ("done", "error", "meta", "parts", "value")

    def __init__(self) -> None:
        self.parts: list[str] = []
        self.value: Any = None
        self.meta: Any = {}
        self.error: ProgramError | None = None
        self.done = False

    def finish(self, value: Any, meta: Any) -> None:
        self.value, self.meta, self.done = value, meta, True

    def fail(self, error: ProgramError) -> None:
        self.error, self.done = error, True


@dataclass(frozen=True, slots=True)
class Fork:
    """The place where branches begin with this one's text."""

    branches: tuple[Branch, ...]


@dataclass(frozen=True, slots=True)
class Step:
    what: Leaf | Fork
    site: Site
    variable: Variable


@dataclass(frozen=True, slots=True)
class _Turn:
    role: str
    start: int  # its content's first part
    after: str  # what the template writes after it


class Branch:
    """Belongs to the loop. `run` is shared with its forks; `label` says which fork it is."""

    def __init__(self, run: Run, label: str = "") -> None:
        self.run = run
        self.label = label
        self.parts: list[str] = []
        self.messages: tuple[Message, ...] = ()
        self.variables: dict[str, Variable] = {}
        self.failure: ProgramError | None = None
        self._steps: deque[Step] = deque()  # the first one may be under way
        self._working = False
        self._opened = False  # whether its first text is known
        self._turn: _Turn | None = None
        self._outside = False  # whether anything was said outside of the roles
        self._scopes: tuple[int, ...] = ()  # the first part of each open one
        self.inherited = 0  # parts that are its parent's
        self._committed = 0  # parts in the prefix that was last committed

    @property
    def program(self) -> str:
        return self.run.program + self.label

    @property
    def settled(self) -> bool:
        return self.failure is not None or (self._opened and not self._steps)

    def has_come(self) -> bool:
        """Whether its text is known as far as it will be: to the program, as far as it has appended."""
        return self.run.ended or (self.settled and self.run.is_current())

    def prompt(self) -> Prompt:
        generating = self._turn is not None and self._turn.role == "assistant" and not self._outside
        return Prompt("".join(self.parts), self.messages if generating else None)

    def leading(self) -> list[Leaf]:
        """Of a branch that is not open yet: what it begins with, up to the first call."""
        constant: list[Leaf] = []
        for step in self._steps:
            if not isinstance(step.what, (str, RoleBegin, RoleEnd)):
                break
            constant.append(step.what)
        return constant

    # ------------------------------------------------------------ for the program

    def append(self, what: Leaf | Fork, site: Site) -> None:
        if self.run.ended:
            raise ProgramError(f"{self.program} has ended: nothing can be appended to its state")
        name = what.name if isinstance(what, (Gen, Select, ScopeEnd)) else None
        variable = Variable()
        if name is not None:
            self.variables[name] = variable
        self._steps.append(Step(what, site, variable))
        self._go_on()

    def fork(self, count: int, site: Site) -> tuple[Branch, ...]:
        names = (f", fork {i} of {count}" for i in range(count))
        branches = tuple(type(self)(self.run, self.label + name) for name in names)
        for branch in branches:
            branch.variables = dict(self.variables)
        self.append(Fork(branches), site)
        return branches

    def set(self, name: str, value: Any, meta: Any) -> None:
        self.variables[name] = variable = Variable()
        variable.finish(value, meta)
        self.run.changed.notify()

    async def opened(self) -> None:
        await self.run.until(lambda: self._opened)

    async def find(self, name: str) -> Variable:
        """The variable, as soon as a step that sets it has been appended; the program itself does not wait for that.

        Raises VariableError where that will not be.
        """
        over = self.run.is_current()
        await self.run.until(lambda: over or self.run.ended or name in self.variables)
        if name not in self.variables:
            self.run.raise_error()
            raise unset(self.program, name, list(self.variables))
        return self.variables[name]

    # ------------------------------------------------------------ its steps

    def open(self, parent: Branch | None = None) -> None:
        """Its steps begin, unless the run has ended before."""
        if self.run.ended:
            return
        if parent is not None:
            self.parts.extend(parent.parts)
            self.messages = parent.messages
            self._turn, self._outside = parent._turn, parent._outside
            self._scopes, self._committed = parent._scopes, parent._committed
            self.inherited = len(self.parts)
        self._opened = True
        self._go_on()

    def fail(self, error: ProgramError) -> None:
        """Neither this branch's text nor what depends on it will be known."""
        failing = [self]
        for branch in failing:  # it grows: forks of forks may go deeper than Python's stack
            branch.failure = branch.failure or error
            while branch._steps:
                step = branch._steps.popleft()
                step.variable.fail(branch.failure)
                if isinstance(step.what, Fork):
                    failing.extend(step.what.branches)
        self.run.changed.notify()

    def _go_on(self) -> None:
        if self.failure is not None:
            self.fail(self.failure)
        elif self._opened and not self._working:
            while self._steps and isinstance(text := self._steps[0].what, str):
                self._say(text)
                self._steps.popleft()
            if self._steps:
                self._working = True
                self.run.start(self._work())
        self.run.changed.notify()

    async def _work(self) -> None:
        try:
            while self._steps and self.failure is None:
                step = self._steps[0]
                await self._take(step)
                self._steps.popleft()
                self.run.changed.notify()
        except asyncio.CancelledError:
            self.fail(ProgramError(f"{self.program} was cancelled"))
            raise
        except BaseException as error:  # raised on, some would end the loop
            failure = program_error(self.program, step.site, error)
            self.run.failed(failure)
            self.fail(failure)
        finally:
            self._working = False

    async def _take(self, step: Step) -> None:
        match step.what:
            case str(text):
                self._say(text)
            case Gen():
                await self._generate(step.what, step.variable)
            case Select():
                await self._select(step.what, step.variable)
            case RoleBegin(role):
                await self._begin_turn(role)
            case RoleEnd(role):
                self._end_turn(role)
            case ScopeBegin():
                self._scopes = (*self._scopes, len(self.parts))
            case ScopeEnd():
                *outer, start = self._scopes
                self._scopes = tuple(outer)
                step.variable.parts.extend(self.parts[start:])
                step.variable.finish("".join(step.variable.parts), {})
            case Fork(branches):
                await self._commit(len(branches))
                for branch in branches:
                    branch.open(self)

    def _say(self, text: str) -> None:
        self.parts.append(text)
        if self._turn is None:
            self._outside = True

    async def _generate(self, gen: Gen, variable: Variable) -> None:
        params = {**self.run.defaults, **gen.params}
        if self.run.stream and params.get("n", 1) == 1:
            async for piece in self.run.backend.stream(self.prompt(), params, self.run.hint):
                variable.meta = piece.meta or variable.meta
                if piece.text:
                    variable.parts.append(piece.text)
                    self._say(piece.text)
                    self.run.changed.notify()
            variable.finish("".join(variable.parts), variable.meta)
            return
        samples = await self.run.backend.generate(self.prompt(), params, self.run.hint)
        self._say(samples[0].text)
        variable.parts.append(samples[0].text)
        if len(samples) == 1:
            variable.finish(samples[0].text, samples[0].meta)
        else:
            variable.finish([sample.text for sample in samples], [sample.meta for sample in samples])

    async def _select(self, select: Select, variable: Variable) -> None:
        chosen = await self.run.backend.select(self.prompt(), select.choices, select.method, self.run.hint)
        self._say(chosen.choice)
        variable.parts.append(chosen.choice)
        variable.finish(chosen.choice, {**chosen.meta, "scores": chosen.scores})

    async def _commit(self, branches: int) -> None:
        """So that the branches find the prefix computed, and it is computed once. One branch alone may do it itself."""
        if branches > 1 and len(self.parts) > self._committed:
            await self.run.commit(self.prompt())
            self._committed = len(self.parts)

    async def _begin_turn(self, role: str) -> None:
        if self._turn is not None:
            raise ValueError(f"a turn of {role} begins inside of one of {self._turn.role}")
        before, after = await self._role_text(role)
        self._turn = _Turn(role, len(self.parts) + 1, after)
        self._say(before)

    async def _role_text(self, role: str) -> tuple[str, str]:
        return await self.run.backend.role_text(self.messages, role)

    def _end_turn(self, role: str) -> None:
        turn = self._turn
        if turn is None or turn.role != role:
            raise ValueError(f"a turn of {role} ends that did not begin")
        self.messages = (*self.messages, Message(role, "".join(self.parts[turn.start :])))
        self._say(turn.after)
        self._turn = None
