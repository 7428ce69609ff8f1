"""States that began with the same text: they are appended to one by one or all at once, and joined."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Self

from gapless.frontend.expressions import Expression
from gapless.frontend.loop import the_loop

if TYPE_CHECKING:
    from gapless.frontend.state import ProgramState

_MODES = ("gather_variable", "concate_and_append")  # SGLang's spelling


class Forks:
    """What `s.fork(n)` gives. In a `with` block, the block's end joins them."""

    def __init__(self, parent: ProgramState, states: list[ProgramState]) -> None:
        self._parent, self._states = parent, states

    def __len__(self) -> int:
        return len(self._states)

    def __iter__(self) -> Iterator[ProgramState]:
        return iter(self._states)

    def __getitem__(self, index: int) -> ProgramState:
        return self._states[index]

    def __setitem__(self, index: int, state: ProgramState) -> None:
        """Python's last step of `forks[i] += ...`."""
        if self._states[index] is not state:
            raise TypeError("a fork cannot be replaced, only appended to")

    def __iadd__(
        self, what: str | Expression | Sequence[str | Expression] | Callable[[int], str | Expression]
    ) -> Self:
        """Appends the same to all, or one item of a list to each, or what a function gives for each one's number."""
        if callable(what):
            items = [what(number) for number in range(len(self))]
        elif isinstance(what, (str, Expression)):
            items = [what] * len(self)
        else:
            items = list(what)
        if len(items) != len(self):
            raise ValueError(f"{len(items)} items for {len(self)} forks")
        for state, item in zip(self._states, items, strict=True):
            state += item
        return self

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if error[0] is None:
            self.join()

    def gather(self, name: str) -> list[Any]:
        """The variable of each fork."""
        return [state[name] for state in self._states]

    async def ready(self) -> None:
        """Waits until all that was appended to the forks has come, or failed: `join` will not wait then."""
        branches = [state._branch for state in self._states]
        await the_loop().reach(branches[0].run.until(lambda: all(branch.has_come() for branch in branches)))

    def join(self, mode: str = "gather_variable") -> None:
        """Waits for all forks; then, of those that failed, raises the first one's error.

        `gather_variable`: variables that the forks set and their parent did not become the parent's, as lists over the
        forks, None where one has not set it. `concate_and_append`: the forks' own texts are appended to the parent.
        """
        if mode not in _MODES:
            raise ValueError(f"mode must be {' or '.join(_MODES)}, got {mode!r}")
        branches = [state._branch for state in self._states]
        if not all(branch.has_come() for branch in branches):
            the_loop().wait(self.ready())
        failures = [branch.failure for branch in branches if branch.failure is not None]
        for failure in failures:
            failure.surfaced = True
        if failures:
            raise failures[0].again()
        if mode == "concate_and_append":
            self._parent += "".join("".join(branch.parts[branch.inherited :]) for branch in branches)
            return
        for name in dict.fromkeys(name for branch in branches for name in branch.variables):
            if name not in self._parent:
                found = [branch.variables.get(name) for branch in branches]
                values = [None if variable is None else variable.value for variable in found]
                metas = [None if variable is None else variable.meta for variable in found]
                self._parent._branch.set(name, values, metas)
