"""A model in memory for tests of the DSL: it writes down every call and answers from a script."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gapless.frontend.backends.base import BackendError, Generated, Hint, Message, Prompt, Selected

WAIT_SECONDS = 30.0


@dataclass
class Call:
    kind: str
    text: str
    group: str | None
    params: Mapping[str, Any] = field(default_factory=dict)
    messages: tuple[Message, ...] | None = None
    cancelled: bool = False


def counted(text: str, number: int) -> str:
    """The default answer: the length of the prompt, and which sample it is."""
    return f"<{len(text)}>" if number == 0 else f"<{len(text)}.{number}>"


class ScriptedBackend:
    """`answer(prompt, sample)` is the text of a sample, or raises; `together` calls of the model begin before any
    of them ends; with `held`, none ends before `let_go` is called, from any thread."""

    def __init__(
        self, answer: Callable[[str, int], str] = counted, together: int = 1, held: bool = False
    ) -> None:
        self.calls: list[Call] = []
        self.in_flight = self.most_in_flight = 0
        self.called, self.cancelled, self.released = threading.Event(), threading.Event(), threading.Event()
        self._answer, self._together = answer, together
        self._go_on = asyncio.Event()
        self._held = held
        self._loop: asyncio.AbstractEventLoop | None = None

    def texts(self, kind: str = "generate") -> list[str]:
        return [call.text for call in self.calls if call.kind == kind]

    def kinds(self) -> list[str]:
        return [call.kind for call in self.calls]

    def let_go(self) -> None:
        assert self._loop is not None
        self._held = False
        self._loop.call_soon_threadsafe(self._go_on.set)

    async def generate(self, prompt: Prompt, params: Mapping[str, Any], hint: Hint) -> list[Generated]:
        await self._record(Call("generate", prompt.text, hint.group, params, prompt.messages))
        return [
            Generated(self._answer(prompt.text, number), {"prompt_chars": len(prompt.text)})
            for number in range(params.get("n", 1))
        ]

    async def stream(self, prompt: Prompt, params: Mapping[str, Any], hint: Hint) -> AsyncIterator[Generated]:
        await self._record(Call("stream", prompt.text, hint.group, params, prompt.messages))
        for place, piece in enumerate(self._answer(prompt.text, 0)):
            await asyncio.sleep(0)  # each piece comes by itself
            yield Generated(piece, {"pieces": place + 1})

    async def select(self, prompt: Prompt, choices: Sequence[str], method: str, hint: Hint) -> Selected:
        """The choice that the script says."""
        await self._record(Call("select", prompt.text, hint.group, {"choices": choices, "method": method}))
        index = choices.index(self._answer(prompt.text, 0))
        return Selected(index, choices[index], tuple(float(i == index) for i in range(len(choices))))

    async def commit(self, prompt: Prompt, hint: Hint) -> None:
        await self._record(Call("commit", prompt.text, hint.group, {}, prompt.messages))

    async def release(self, group: str) -> None:
        self.calls.append(Call("release", "", group))
        self.released.set()

    async def role_text(self, before: Sequence[Message], role: str) -> tuple[str, str]:
        return f"[{role}]", "[end]"

    async def close(self) -> None:
        pass

    async def _record(self, call: Call) -> None:
        self._loop = asyncio.get_running_loop()
        self.calls.append(call)
        if call.kind == "commit":
            return
        self.called.set()
        self.in_flight += 1
        self.most_in_flight = max(self.in_flight, self.most_in_flight)
        if self.in_flight >= self._together and not self._held:
            self._go_on.set()
        try:
            await asyncio.wait_for(self._go_on.wait(), WAIT_SECONDS)
        except asyncio.CancelledError:
            call.cancelled = True
            self.cancelled.set()
            raise
        finally:
            self.in_flight -= 1


def refuse(text: str, number: int) -> str:
    raise BackendError("the model is gone", 503)
