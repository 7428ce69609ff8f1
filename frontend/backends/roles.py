"""What a chat template writes around the turns of a conversation, turn by turn.

A program's text only grows, while a template is a function of the whole conversation. So conversations are rendered
with a mark for each content, and what stands between two marks is cut where a turn ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from gapless.frontend.backends.base import BackendError

MAX_CACHED = 4096  # sequences of roles

Turn = tuple[str, str]  # what comes before the content, and after it
Roles = tuple[str, ...]


class RoleTexts:
    """By the roles alone: a template that looks at the contents is asked about those of the marks.

    An assistant's turn begins as a prompt for generation does, so that a conversation of a system, a user and so on
    is the prompt that /v1/chat/completions makes of it. Raises BackendError with what a template says where it
    refuses the roles, and where the text of earlier turns would have to change.
    """

    def __init__(
        self,
        render: Callable[[list[dict[str, str]], bool], Awaitable[str]],
        without_bos: Callable[[str], Awaitable[str]],
    ) -> None:
        """`render(messages, add_generation_prompt)`; `without_bos` drops from a text what the tokenizer will add."""
        self._render, self._without_bos = render, without_bos
        self._known: dict[tuple[Roles, str], asyncio.Task[Turn]] = {}

    async def around(self, before: Sequence[str], role: str) -> Turn:
        """(before, after) the content of a turn of `role` that follows turns of these roles."""
        key = tuple(before), role
        if (task := self._known.get(key)) is None:
            task = self._known[key] = asyncio.create_task(self._make(*key))
            task.add_done_callback(lambda done: self._forget_failed(key, done))
            if len(self._known) > MAX_CACHED:
                del self._known[next(iter(self._known))]
        return await asyncio.shield(task)

    def _forget_failed(self, key: tuple[Roles, str], task: asyncio.Task[Turn]) -> None:
        if (task.cancelled() or task.exception() is not None) and self._known.get(key) is task:
            del self._known[key]

    async def _make(self, before: Roles, role: str) -> Turn:
        prefix, suffix = await self._cut(before, role)
        if not before:
            return await self._without_bos(prefix), suffix
        _, written = await self.around(before[:-1], before[-1])
        if not prefix.startswith(written):
            raise BackendError(
                f"the chat template writes {prefix!r} between the {before[-1]} and the {role} turn, where the "
                f"{before[-1]} turn has ended with {written!r}"
            )
        return prefix.removeprefix(written), suffix

    async def _cut(self, before: Roles, role: str) -> Turn:
        """(all between the previous content and this one's, what ends the turn)."""
        if role == "system":
            prompt, suffix = await self._system(before)
        else:
            prompt, suffix = _split(await self._rendered((*before, role)), len(before), role)
        if role == "assistant" and before:
            prompt = await self._rendered(before, generation=True)
        if not before:
            return prompt, suffix
        _, previous, between = prompt.rpartition(_mark(len(before) - 1))
        if not previous:
            raise BackendError(f"the chat template leaves out the {before[-1]} turn before a {role} turn")
        if "system" in before and any(_mark(i) in between for i in range(len(before))):
            # The template moves the system's turn along. It stays where it was written.
            return await self._cut(tuple(r for r in before if r != "system"), role)
        return between, suffix

    async def _system(self, before: Roles) -> Turn:
        """Some templates write a system's turn into the user's that follows it, and nothing before that is there."""
        turns = (*before, "system")
        try:
            return _split(await self._rendered(turns), len(before), "system")
        except BackendError as error:
            try:
                text = await self._rendered((*turns, "user"))
                prompt, rest = _split(text, len(before), "system")
            except BackendError:
                raise error from None
            return prompt, _split(rest, len(turns), "user")[0]

    async def _rendered(self, roles: Roles, *, generation: bool = False) -> str:
        messages = [{"role": role, "content": _mark(i)} for i, role in enumerate(roles)]
        return await self._render(messages, generation)


def _mark(i: int) -> str:
    """The content of turn `i`: a text that no template has, and in which none finds anything to change."""
    return f"content{i}of-this-turn"


def _split(text: str, turn: int, role: str) -> Turn:
    prefix, mark, suffix = text.partition(_mark(turn))
    if not mark:
        raise BackendError(f"the chat template has no place for a {role} turn here")
    return prefix, suffix
