"""Emptying the prefix cache: the front's side.

The scheduler flushes only at rest, so it may refuse. It comes to rest a few steps after the clients have their last
answers, and nobody should have to know: as long as no request is alive here, a refusal is no answer yet.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from gapless.runtime.core.errors import GaplessError, RequestError
from gapless.runtime.core.messages import Flush, Flushed
from gapless.tokenizer_manager.states import Registry

GRACE_SECONDS = 1.0  # for the steps that are in flight when the last request ends
_RETRY_SECONDS = 0.02
_CHECK_SECONDS = 0.5  # between two looks at the engine's health while it owes an answer


@dataclass(frozen=True, slots=True)
class FlushResult:
    """Whether the cache was flushed, which is its truth value, too; `pages` counts those freed."""

    success: bool
    message: str
    pages: int

    def __bool__(self) -> bool:
        return self.success


class Flusher:
    """For one event loop. `check` raises while the engine cannot answer."""

    def __init__(self, send: Callable[[Flush], None], registry: Registry, check: Callable[[], None]) -> None:
        self._send, self._registry, self._check = send, registry, check
        self._numbers = itertools.count(1)
        self._asked: dict[int, asyncio.Future[Flushed]] = {}

    async def flush(self, timeout: float, model_path: str = "") -> FlushResult:
        """Flushes as soon as nothing runs; says what still does when `timeout` seconds are over.

        With `model_path` the engine takes those weights first, or RequestError says why it keeps the ones it has.
        Raises UnavailableError while the engine cannot answer, and what ended it where it ends meanwhile.
        """
        deadline = asyncio.get_running_loop().time() + timeout
        while True:
            answer = await self._ask_while_empty(model_path)
            if answer.error:
                raise RequestError(answer.error, param="model_path")
            if answer.done:
                return FlushResult(
                    True, f"the cache was flushed: {answer.pages} pages were freed", answer.pages
                )
            if asyncio.get_running_loop().time() >= deadline:
                return FlushResult(False, _refusal(answer), 0)
            with suppress(TimeoutError):
                async with asyncio.timeout_at(deadline):
                    await self._registry.empty.wait()

    def answered(self, message: Flushed) -> None:
        asked = self._asked.get(message.number)
        if asked is not None and not asked.done():
            asked.set_result(message)

    def fail_all(self, error: GaplessError) -> None:
        """No answer will come."""
        for asked in self._asked.values():
            if not asked.done():
                asked.set_exception(error)

    async def _ask_while_empty(self, model_path: str) -> Flushed:
        """The engine's answer; a refusal counts when a request is alive here, or the grace is over."""
        loop = asyncio.get_running_loop()
        grace_ends = loop.time() + GRACE_SECONDS
        while True:
            answer = await self._ask(model_path)
            if answer.done or answer.error or len(self._registry) or loop.time() >= grace_ends:
                return answer
            await asyncio.sleep(_RETRY_SECONDS)

    async def _ask(self, model_path: str) -> Flushed:
        self._check()
        number = next(self._numbers)
        asked: asyncio.Future[Flushed] = asyncio.get_running_loop().create_future()
        self._asked[number] = asked
        try:
            self._send(Flush(number, model_path))
            while not (await asyncio.wait({asked}, timeout=_CHECK_SECONDS))[0]:
                self._check()
            return asked.result()
        finally:
            del self._asked[number]


def _refusal(answer: Flushed) -> str:
    return (
        f"the cache is in use (running requests: {answer.running}, waiting: {answer.waiting}); flush it when they "
        "have ended, or give a timeout to wait for that"
    )
