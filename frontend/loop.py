"""The event loop on which all programs of a process run, in one thread, and how code anywhere waits for it.

A plain function runs there as a greenlet: where it waits, it hands the thread back to the loop, so that any number of
programs are in flight without threads of their own. (The method is that of SQLAlchemy's asyncio layer.)
"""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import os
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import greenlet  # type: ignore[import-untyped]

from gapless.frontend.errors import ProgramError

T = TypeVar("T")
_STOP_SECONDS = 5.0


class Loop:
    """A running event loop and its thread."""

    def __init__(self) -> None:
        self.asyncio = _new_event_loop()
        self._tasks: set[asyncio.Task[Any]] = set()  # asyncio itself keeps none alive
        self._thread = threading.Thread(target=self._run, name="gapless-frontend", daemon=True)
        self._thread.start()

    def is_here(self) -> bool:
        return threading.current_thread() is self._thread

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Starts it; cancelling the future cancels it. It sees the caller's context variables."""
        future: concurrent.futures.Future[T] = concurrent.futures.Future()
        self._start(coroutine, future)
        return future

    def wait(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Its result, waited for without holding up the loop; an interrupt of the wait cancels it.

        Raises ProgramError where there is no way to wait: in an `async def` program.
        """
        if isinstance(current := greenlet.getcurrent(), _Fiber):
            result: T = current.parent.switch(coroutine)
            return result
        if self.is_here():
            coroutine.close()
            raise ProgramError(
                "this would hold up all programs: in an async program, await s.get(name) reads a variable, "
                "await s.ready() or await forks.ready() waits for all that was appended, and other programs "
                "run by await program.run_async(...)"
            )
        future: concurrent.futures.Future[T] = concurrent.futures.Future()
        try:
            self._start(coroutine, future)
            return future.result()
        finally:
            future.cancel()  # where the wait was interrupted; else it has ended

    async def reach(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Its result, for a coroutine of any loop."""
        if self.is_here():
            return await coroutine
        return await asyncio.wrap_future(self.submit(coroutine))

    def close(self) -> None:
        self.asyncio.call_soon_threadsafe(self.asyncio.stop)
        self._thread.join(_STOP_SECONDS)

    def _start(self, coroutine: Coroutine[Any, Any, T], future: concurrent.futures.Future[T]) -> None:
        """`asyncio.run_coroutine_threadsafe` for a future of the caller's, who may be interrupted even here."""

        def begin() -> None:
            task = self.asyncio.create_task(coroutine)
            self._tasks.add(task)
            task.add_done_callback(finish)
            future.add_done_callback(
                lambda ended: self.asyncio.call_soon_threadsafe(task.cancel) if ended.cancelled() else None
            )

        def finish(task: asyncio.Task[T]) -> None:
            self._tasks.discard(task)
            if task.cancelled():
                future.cancel()
                return
            error = task.exception()
            if not future.set_running_or_notify_cancel():
                return
            if error is None:
                future.set_result(task.result())
            else:
                future.set_exception(error)

        self.asyncio.call_soon_threadsafe(begin)

    def _run(self) -> None:
        asyncio.set_event_loop(self.asyncio)
        self.asyncio.run_forever()


class _Fiber(greenlet.greenlet):  # type: ignore[misc]
    """A greenlet that `in_fiber` drives."""


async def in_fiber(function: Callable[[], T]) -> T:
    """Calls a plain function on this loop's thread; `Loop.wait` in it is this coroutine's wait."""
    fiber = _Fiber(function)
    fiber.gr_context = greenlet.getcurrent().gr_context
    result = fiber.switch()
    while not fiber.dead:
        try:
            value = await result
        except BaseException as error:
            result = fiber.throw(error)
        else:
            result = fiber.switch(value)
    return result  # type: ignore[no-any-return]


class Signal:
    """Wakes those who wait for a change; they look for themselves what it was."""

    __slots__ = ("_waiting",)

    def __init__(self) -> None:
        self._waiting: list[asyncio.Future[None]] = []

    async def wait(self) -> None:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(future)
        await future

    def notify(self) -> None:
        waiting, self._waiting = self._waiting, []
        for future in waiting:
            if not future.done():
                future.set_result(None)


_lock = threading.Lock()
_loop: Loop | None = None


def the_loop() -> Loop:
    """The process's loop, started at its first use."""
    global _loop
    with _lock:
        if _loop is None:
            _loop = Loop()
        return _loop


def _forget() -> None:
    """In a forked process, which has none of the parent's threads."""
    global _lock, _loop
    _lock, _loop = threading.Lock(), None


@atexit.register
def _close() -> None:
    if _loop is not None:
        _loop.close()


os.register_at_fork(after_in_child=_forget)


def _new_event_loop() -> asyncio.AbstractEventLoop:
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    return loop
