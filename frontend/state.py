"""`s`: what a program's function appends to and reads from, and what a run gives back."""

from __future__ import annotations

import operator
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Self

from gapless.frontend.branch import Branch, Variable
from gapless.frontend.errors import ProgramError, call_site
from gapless.frontend.expressions import (
    Concatenation,
    Expression,
    RoleBegin,
    RoleEnd,
    ScopeBegin,
    ScopeEnd,
    leaves,
    turn,
)
from gapless.frontend.forks import Forks
from gapless.frontend.loop import the_loop


class ProgramState:
    """Appending does not wait; reading waits for what is read, inside the program and in the run's caller.

    An `async def` program reads with `await s.get(name)`, or waits with `await s.ready()` and then reads. Reading
    raises ProgramError where what is read failed, and VariableError where it was never set. Only the program appends.
    """

    def __init__(self, branch: Branch) -> None:
        self._branch = branch

    # ------------------------------------------------------------ appending

    def __iadd__(self, what: str | Expression) -> Self:
        self._append(what)
        return self

    def system(self, content: str | Expression | None = None) -> Any:
        """A turn of the system: its content, or what is appended in the `with` block; so are `user`, `assistant`.

        With content it may be written `s += s.system(...)`, too, as in SGLang's documentation.
        """
        return self._turn("system", content)

    def user(self, content: str | Expression | None = None) -> Any:
        return self._turn("user", content)

    def assistant(self, content: str | Expression | None = None) -> Any:
        return self._turn("assistant", content)

    def var_scope(self, name: str) -> AbstractContextManager[ProgramState]:
        """What is appended in the `with` block becomes the variable `name`, too. Scopes may be in one another."""
        return self._between(ScopeBegin(name), ScopeEnd(name))

    def fork(self, size: int = 1, position_ids_offset: object = None) -> Forks:
        """`size` states that begin with this one's text and variables, computed once; they run at the same time.

        `position_ids_offset` is SGLang's, and not needed here.
        """
        if (count := operator.index(size)) < 1:
            raise ValueError(f"a fork needs a size of at least 1, got {size}")
        self._check_thread()
        branches = self._branch.fork(count, call_site())
        return Forks(self, [type(self)(branch) for branch in branches])

    def copy(self) -> ProgramState:
        """One fork. In a `with` block, the block's end waits for it."""
        return self.fork(1)[0]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if error[0] is None:
            self.sync()

    def set_var(self, name: str, value: Any) -> None:
        self._check_thread()
        self._branch.set(name, value, {})

    __setitem__ = set_var

    # ------------------------------------------------------------ reading

    def __getitem__(self, name: str) -> Any:
        return self._value(self._variable(name))

    get_var = __getitem__

    def __contains__(self, name: str) -> bool:
        return name in self._branch.variables

    def get_meta_info(self, name: str) -> Any:
        """What the backend tells of the call that set the variable: /generate's `meta_info`; a list with `n`."""
        variable = self._variable(name)
        self._value(variable)
        return variable.meta

    async def get(self, name: str) -> Any:
        """The variable, for an async program or any other coroutine."""
        return self._value(await the_loop().reach(self._read(name)))

    async def ready(self) -> None:
        """Waits for all that was appended, or in the caller for the run's end; raises what failed."""
        if not self._branch.has_come():
            await the_loop().reach(self._branch.run.until(self._branch.has_come))
        self._check()

    def sync(self) -> None:
        """`ready`, where a plain function or the run's caller waits."""
        self._settle()
        self._check()

    def error(self) -> ProgramError | None:
        """Why the program failed, or None."""
        self._settle()
        if (error := self._failure()) is not None:
            error.surfaced = True
        return error

    def text(self) -> str:
        self.sync()
        return "".join(self._branch.parts)

    def messages(self) -> list[dict[str, str]]:
        """The finished turns: role and content of each."""
        self.sync()
        return [{"role": turn.role, "content": turn.content} for turn in self._branch.messages]

    @property
    def ret_value(self) -> Any:
        """What the function returned."""
        self.sync()
        return self._branch.run.value

    def __repr__(self) -> str:
        return f"ProgramState({''.join(self._branch.parts)})"

    def __str__(self) -> str:
        self._settle()
        return repr(self)

    # ------------------------------------------------------------ streaming

    def text_iter(self, var_name: str | None = None) -> Iterator[str]:
        """Pieces of all the text, or of a variable's, as they come where the program runs with `stream=True`."""
        pieces = _Pieces(self._branch, var_name)
        while (piece := the_loop().wait(pieces.next())) is not None:
            yield piece

    async def text_async_iter(
        self, var_name: str | None = None, return_meta_data: bool = False
    ) -> AsyncIterator[Any]:
        """`text_iter` for `async for`, on any loop; with `return_meta_data`, pairs of a variable's piece and its meta
        info so far."""
        if return_meta_data and var_name is None:
            raise ValueError("return_meta_data is for a variable's pieces: give var_name")
        pieces = _Pieces(self._branch, var_name)
        while (piece := await the_loop().reach(pieces.next())) is not None:
            yield (piece, pieces.meta) if return_meta_data else piece

    # ------------------------------------------------------------ inside

    def _check_thread(self) -> None:
        if not the_loop().is_here():
            raise ProgramError(f"{self._branch.program}: only the program itself appends to its state")

    def _append(self, what: object) -> None:
        self._check_thread()
        site = call_site()
        for leaf in leaves(what):
            self._branch.append(leaf, site)

    def _turn(self, role: str, content: object) -> AbstractContextManager[ProgramState] | Expression:
        if content is None:
            return self._between(RoleBegin(role), RoleEnd(role))
        self._append(turn(role, content))
        return Concatenation(())

    @contextmanager
    def _between(self, begin: Expression, end: Expression) -> Iterator[ProgramState]:
        self._append(begin)
        try:
            yield self
        finally:
            self._append(end)

    def _settle(self) -> None:
        if not self._branch.has_come():
            the_loop().wait(self._branch.run.until(self._branch.has_come))

    def _failure(self) -> ProgramError | None:
        return self._branch.run.error or self._branch.failure

    def _check(self) -> None:
        if (error := self._failure()) is not None:
            raise error.again()

    def _variable(self, name: str) -> Variable:
        variable = self._branch.variables.get(name)
        if variable is None or not variable.done:
            variable = the_loop().wait(self._read(name))
        return variable

    async def _read(self, name: str) -> Variable:
        variable = await self._branch.find(name)
        await self._branch.run.until(lambda: variable.done or self._branch.run.ended)
        return variable

    def _value(self, variable: Variable) -> Any:
        if (error := self._branch.run.error or variable.error) is not None:
            raise error.again()
        return variable.value


class _Pieces:
    """What is new of a branch's text, or of a variable's, since the last look."""

    def __init__(self, branch: Branch, name: str | None) -> None:
        self._branch, self._name, self._seen = branch, name, 0
        self.meta: Any = {}

    async def next(self) -> str | None:
        """At least one character, as soon as there is one; None at the end. Raises what ended it early."""
        branch, run = self._branch, self._branch.run
        variable = None if self._name is None else await branch.find(self._name)
        parts = branch.parts if variable is None else variable.parts

        def is_over() -> bool:
            return branch.has_come() if variable is None else variable.done or run.ended

        while True:
            await run.until(lambda: len(parts) > self._seen or is_over())
            piece = "".join(parts[self._seen :])
            self._seen = len(parts)
            self.meta = self.meta if variable is None else variable.meta
            if piece:
                return piece
            if is_over():
                error = run.error or (branch.failure if variable is None else variable.error)
                if error is not None:
                    raise error.again()
                return None
