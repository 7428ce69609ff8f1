"""A function with its arguments and its state, ready to run."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from types import CodeType
from typing import Any

from gapless.frontend.branch import Branch
from gapless.frontend.loop import in_fiber
from gapless.frontend.state import ProgramState


class Job:
    """`branch` is to be opened, before `run` or while it waits: nothing is said before."""

    def __init__(
        self, function: Callable[..., Any], branch: Branch, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> None:
        self.branch = branch
        self.state = ProgramState(branch)
        self._function = function
        self._call = partial(function, self.state, *args, **kwargs)

    async def run(self) -> None:
        """To its end. It does not raise what the program raises: that is the run's `error`."""
        code: CodeType | None = getattr(self._function, "__code__", None)
        await self.branch.run.execute(self._value, code)

    async def _value(self) -> Any:
        is_async = inspect.iscoroutinefunction(self._function)
        value = await (self._call() if is_async else in_fiber(self._call))
        await self.branch.opened()  # a function that reads nothing returns before its first step
        return value
