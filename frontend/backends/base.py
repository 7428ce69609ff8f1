"""What a program needs of a model, wherever the model runs."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class Message:
    """One finished turn of a conversation."""

    role: str  # system, user or assistant
    content: str


@dataclass(frozen=True, slots=True)
class Prompt:
    """A program's state: all its text, and the same as a conversation where all of it was said in roles.

    `messages` ends before the assistant's turn that is being generated; `text` holds what has been said of that turn.
    """

    text: str
    messages: tuple[Message, ...] | None = None


@dataclass(frozen=True, slots=True)
class Hint:
    """What the scheduler may know about a call: `group` is shared by the calls of one program, its forks included."""

    group: str | None = None


@dataclass(frozen=True, slots=True)
class Generated:
    """One sample: its text (of a stream: what is new), and `meta_info` as /generate gives it, as far as it is known."""

    text: str
    meta: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Selected:
    """The choice that scored best; `scores` has one number a choice, higher is better, by the method asked for."""

    index: int
    choice: str
    scores: tuple[float, ...]
    meta: Mapping[str, Any] = field(default_factory=dict)


class Backend(Protocol):
    """All methods run on one event loop, the interpreter's. They raise BackendError; cancelling one aborts its call.

    `params` are sampling parameters by /generate's names (`max_new_tokens`, `stop`, `regex`, ...), checked by whoever
    serves them.
    """

    async def generate(self, prompt: Prompt, params: Mapping[str, Any], hint: Hint) -> list[Generated]:
        """`params["n"]` samples, or one."""

    def stream(self, prompt: Prompt, params: Mapping[str, Any], hint: Hint) -> AsyncIterator[Generated]:
        """One sample, piece by piece; the last piece's `meta` is the whole's."""

    async def select(self, prompt: Prompt, choices: Sequence[str], method: str, hint: Hint) -> Selected:
        """`method` is one of `select.METHODS`."""

    async def commit(self, prompt: Prompt, hint: Hint) -> None:
        """Computes the KV of the prompt once and, in a group, keeps it until `release`. Where that is not possible
        it does nothing: it is a hint."""

    async def release(self, group: str) -> None:
        """The group's calls have ended."""

    async def role_text(self, before: Sequence[Message], role: str) -> tuple[str, str]:
        """What the model's chat template writes before and after the content of a turn that follows `before`."""

    async def close(self) -> None:
        """Lets go of connections. What the caller made, such as an Engine, stays the caller's."""


class BackendError(Exception):
    """A call that the model's side refused or lost. `status` is the HTTP status where there is one."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status
