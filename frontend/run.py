"""One run of a program: what its branches share, and its end."""

from __future__ import annotations

import asyncio
import itertools
import os
import uuid
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from contextlib import suppress
from contextvars import ContextVar
from types import CodeType
from typing import Any

from gapless.frontend.backends.base import Backend, BackendError, Hint, Prompt
from gapless.frontend.errors import ProgramError, program_error, raising_site
from gapless.frontend.loop import Signal

_RELEASE_SECONDS = 5.0  # a server that hangs must not hold up the end of what was cancelled because of that
_SESSION = uuid.uuid4().hex  # shared with the processes that are forked from this one
_numbers = itertools.count()

_current: ContextVar[Run | None] = ContextVar("gapless_run", default=None)  # whose function runs


class Run:
    """Belongs to the loop. It has ended when its function has returned and all its calls have ended."""

    def __init__(
        self,
        program: str,
        backend: Backend | None,
        defaults: Mapping[str, Any] | None = None,
        stream: bool = False,
    ) -> None:
        self.program = program
        self._backend = backend
        self.defaults = defaults or {}  # sampling parameters, where a call gives none of its own
        self.stream = stream
        self.changed = Signal()  # anything of it
        self._process = os.getpid()
        self.hint = Hint(f"{_SESSION}-{self._process}-{next(_numbers)}")
        self.ended = False
        self.value: Any = None  # what the function returned
        self.error: ProgramError | None = None  # why it failed, once it has ended
        self._holds = False  # whether the backend keeps something for it
        self._caller = _current.get()  # the run whose function starts this one
        self._tasks: set[asyncio.Task[None]] = set()  # the branches at work
        self._failures: list[ProgramError] = []  # theirs, in order

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    @property
    def backend(self) -> Backend:
        assert self._backend is not None, "a traced run calls no model"
        return self._backend

    async def commit(self, prompt: Prompt) -> None:
        self._holds = True
        await self.backend.commit(prompt, self.hint)

    def is_current(self) -> bool:
        """Whether its own function asks, or that of a run it has started."""
        run = _current.get()
        while run is not None and run is not self:
            run = run._caller
        return run is self

    async def until(self, come: Callable[[], bool]) -> None:
        while not come():
            if os.getpid() != self._process:
                raise ProgramError(f"{self.program} does not run in this process, which was forked meanwhile")
            await self.changed.wait()

    def raise_error(self) -> None:
        if self.error is not None:
            raise self.error.again()

    def failed(self, error: ProgramError) -> None:
        self._failures.append(error)

    async def execute(self, call: Callable[[], Awaitable[Any]], code: CodeType | None) -> None:
        """Runs the function to the run's end; `error` says how that went. Cancelling it cancels all calls.

        A function that raises ends its calls; a failed call ends those that need its text. A failure that the function
        has been told of and has handled is not the run's.
        """
        token = _current.set(self)
        try:
            self.value = await call()
            while self._tasks:
                await asyncio.wait(self._tasks)
            self.error = next((error for error in self._failures if not error.surfaced), None)
        except BaseException as error:
            self.error = program_error(self.program, raising_site(error.__traceback__, code), error)
            if isinstance(error, asyncio.CancelledError) and _is_being_cancelled():
                raise
        finally:
            _current.reset(token)
            try:
                await self._end()
            finally:
                self.ended = True
                self.changed.notify()

    async def _end(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.release()

    async def release(self) -> None:
        """Lets go of what was committed."""
        if self._holds and self.hint.group is not None:
            # Who cannot be reached keeps nothing for us, and our calls have said so.
            with suppress(BackendError, TimeoutError):
                async with asyncio.timeout(_RELEASE_SECONDS):
                    await self.backend.release(self.hint.group)


def _is_being_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
