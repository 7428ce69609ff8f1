"""What the backends that speak /generate's fields have in common: an engine in this process, and a server."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from typing import Any

from gapless.frontend.backends import scoring
from gapless.frontend.backends.base import BackendError, Generated, Hint, Message, Prompt, Selected
from gapless.frontend.backends.roles import RoleTexts, Turn
from gapless.frontend.backends.templates import FORMATS, chat_format

Fields = Mapping[str, Any]
_OF_THE_REQUEST = (  # among a call's parameters, those that /generate does not have among its sampling parameters
    "return_logprob", "logprob_start_len", "top_logprobs_num", "token_ids_logprob", "return_text_in_logprobs",
)  # fmt: skip
_LONGEST_BOS = 64  # characters


class NativeBackend(ABC):
    """The abstract methods are the ways to a model; they raise BackendError."""

    def __init__(self, chat_template: str | None) -> None:
        """`chat_template` names a chat format to be used in place of the model's template; ValueError: none has it."""
        self._format = None if chat_template is None else chat_format(chat_template)
        self._role_texts = RoleTexts(self._render, self._without_bos)

    async def generate(self, prompt: Prompt, params: Mapping[str, Any], hint: Hint) -> list[Generated]:
        answers = await self._call(_fields(prompt.text, params, hint))
        return [_generated(answer, answer["text"]) for answer in _as_list(answers)]

    async def stream(self, prompt: Prompt, params: Mapping[str, Any], hint: Hint) -> AsyncIterator[Generated]:
        if params.get("n") not in (None, 1):
            raise BackendError(f"n is {params['n']!r}: a stream has one sample")
        text, logprobs = "", dict[str, list[Any]]()
        fields = _fields(prompt.text, params, hint) | {"stream": True}
        async with aclosing(self._events(fields)) as events:
            async for event in events:
                gained, meta = event["text"], event["meta_info"]
                lists = {name: value for name, value in meta.items() if name.endswith("_logprobs")}
                if self._is_increment(event):
                    for name, value in lists.items():
                        logprobs.setdefault(name, []).extend(value)
                else:
                    text, gained = gained, gained[len(text) :]
                    logprobs = {name: [*value] for name, value in lists.items()}
                if meta.get("finish_reason"):
                    meta |= logprobs
                yield _generated(event, gained)

    async def select(self, prompt: Prompt, choices: Sequence[str], method: str, hint: Hint) -> Selected:
        return await scoring.select(self._call, self._tokenize, prompt.text, choices, method, _group(hint))

    async def commit(self, prompt: Prompt, hint: Hint) -> None:
        if prompt.text:
            hold = {"hold_prefix": True} if hint.group else {}
            await self._call(_fields(prompt.text, {"max_new_tokens": 0}, hint) | hold)

    @abstractmethod
    async def release(self, group: str) -> None:
        """Lets go of what the group holds in the cache."""

    async def role_text(self, before: Sequence[Message], role: str) -> Turn:
        roles = [message.role for message in before]
        if self._format is not None:
            return self._format.around(roles, role)
        try:
            return await self._role_texts.around(roles, role)
        except BackendError as error:
            if "no chat template" not in str(error):
                raise
            names = ", ".join(FORMATS)
            raise BackendError(f"{error}; or give the backend one of {names} by chat_template=") from error

    @abstractmethod
    async def close(self) -> None:
        """Lets go of connections, where there are any."""

    @abstractmethod
    async def _call(self, fields: Fields) -> Any:
        """The answer to a request of /generate's fields: of a batch, or of several samples, a list."""

    @abstractmethod
    def _events(self, fields: Fields) -> AsyncGenerator[Any, None]:
        """The events of the same as a stream, each with what came since the last one or with all that came."""

    @abstractmethod
    def _is_increment(self, event: Any) -> bool:
        """Whether the event has but what came since the last one; for the first, both are true."""

    @abstractmethod
    async def _tokenize(
        self, texts: Sequence[str], add_special_tokens: bool = True
    ) -> list[list[int]] | None:
        """None where the server does not do that."""

    @abstractmethod
    async def _render(self, messages: list[dict[str, str]], add_generation_prompt: bool) -> str:
        """The prompt that the model's chat template makes."""

    async def _without_bos(self, text: str) -> str:
        """`text` without the begin-of-text token that it begins with, where the tokenizer puts one before any text.

        Templates write it; /generate tokenizes a text as a text, and would have it twice.
        """
        added, plain = await self._tokenize([text]), await self._tokenize([text], add_special_tokens=False)
        if not (added and plain and plain[0] and added[0][: len(plain[0]) + 1] == [plain[0][0], *plain[0]]):
            return text
        heads = [text[:size] for size in range(1, min(len(text), _LONGEST_BOS) + 1)]
        for head, ids in zip(heads, await self._tokenize(heads, add_special_tokens=False) or (), strict=True):
            if ids == plain[0][:1]:
                return text.removeprefix(head)
        raise BackendError(f"the begin-of-text token of the chat template is not found in {text!r}")


def _fields(text: str, params: Mapping[str, Any], hint: Hint) -> dict[str, Any]:
    asked = {name: value for name, value in params.items() if name in _OF_THE_REQUEST}
    sampling = {name: value for name, value in params.items() if name not in _OF_THE_REQUEST}
    return {"text": text, "sampling_params": sampling, **asked, **_group(hint)}


def _group(hint: Hint) -> dict[str, Any]:
    return {"group_id": hint.group} if hint.group else {}


def _as_list(answers: Any) -> list[Any]:
    return answers if isinstance(answers, list) else [answers]


def _generated(answer: Any, text: str) -> Generated:
    meta = answer["meta_info"]
    reason = meta.get("finish_reason")
    if isinstance(reason, dict) and reason.get("type") == "abort":
        raise BackendError(
            f"aborted: {reason.get('message') or 'no reason given'}", reason.get("status_code")
        )
    return Generated(text, meta)
