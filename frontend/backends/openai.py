"""Servers that speak OpenAI's API: completions, and chat completions where a prompt is said in roles."""

from __future__ import annotations

import json
import math
import os
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import aclosing
from typing import Any

from gapless.frontend.backends.base import BackendError, Generated, Hint, Message, Prompt, Selected
from gapless.frontend.backends.http import JsonClient
from gapless.frontend.backends.roles import Turn
from gapless.frontend.backends.select import (
    Tail,
    check_choices,
    greedy_token_selection,
    nothing_before,
    selected,
    shared_tokens,
    unconditional_likelihood_normalized,
)
from gapless.frontend.backends.templates import ChatFormat, chat_format

_DEFAULT_MAX_TOKENS = 128  # /generate's, where OpenAI's two routes have two others
_NAMES = {  # /generate's name of a sampling parameter: OpenAI's
    "temperature": "temperature", "top_p": "top_p", "frequency_penalty": "frequency_penalty",
    "presence_penalty": "presence_penalty", "logit_bias": "logit_bias", "stop": "stop", "n": "n",
    "sampling_seed": "seed",
}  # fmt: skip
_EXTENSIONS = {  # /generate's name: that of the field by which our server, SGLang's and some others take it
    "min_new_tokens": "min_tokens", "top_k": "top_k", "min_p": "min_p", "repetition_penalty": "repetition_penalty",
    "stop_token_ids": "stop_token_ids", "ignore_eos": "ignore_eos", "skip_special_tokens": "skip_special_tokens",
    "no_stop_trim": "no_stop_trim", "regex": "regex", "ebnf": "ebnf",
}  # fmt: skip


class OpenAI:
    """What the API has no way to do is refused before anything is sent. Hints for the cache are no part of it.

    A prompt in roles goes to chat completions and any other to completions, unless `is_chat_model` says that the
    model has but one of the two. In completions, roles are written in the format that `chat_template` names.
    `extensions` are the sampling parameters beyond OpenAI's that the server is known to take, by /generate's names; a
    server that does not know one would ignore it and answer another question.

    `api_key` is that of the environment's OPENAI_API_KEY where none is given; `timeout` in seconds, for a whole call.
    Raises ValueError where the URL, the format or an extension is none.
    """

    def __init__(
        self,
        model: str,
        *,
        base_url: str = "https://api.openai.com/v1",
        api_key: str | None = None,
        is_chat_model: bool | None = None,
        chat_template: str | None = None,
        extensions: Collection[str] = (),
        timeout: float | None = None,
    ) -> None:
        if unknown := sorted(set(extensions) - _EXTENSIONS.keys() - {"json_schema"}):
            raise ValueError(
                f"extensions has {unknown[0]!r}: known are json_schema, {', '.join(_EXTENSIONS)}"
            )
        self.model = model
        self._http = JsonClient(base_url, api_key or os.environ.get("OPENAI_API_KEY"), timeout)
        self._is_chat = is_chat_model
        self._format = None if chat_template is None else chat_format(chat_template)
        self._extensions = frozenset(extensions)

    async def generate(self, prompt: Prompt, params: Mapping[str, Any], hint: Hint) -> list[Generated]:
        path, body = self._request(prompt, params)
        answer = await self._http.call("POST", path, body)
        usage = _usage(answer)
        if len(answer["choices"]) > 1:
            usage.pop("completion_tokens", None)  # it is that of all of them
        return [
            Generated(_text(choice), {"id": answer.get("id"), **usage, "finish_reason": _reason(choice)})
            for choice in sorted(answer["choices"], key=lambda choice: choice["index"])
        ]

    async def stream(self, prompt: Prompt, params: Mapping[str, Any], hint: Hint) -> AsyncIterator[Generated]:
        if params.get("n") not in (None, 1):
            raise BackendError(f"n is {params['n']!r}: a stream has one sample")
        path, body = self._request(prompt, params)
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        meta: dict[str, Any] = {}
        async with aclosing(self._http.events(path, body)) as events:
            async for event in events:
                meta |= {"id": event.get("id"), **_usage(event)}
                for choice in event["choices"]:
                    if choice.get("finish_reason"):
                        meta["finish_reason"] = _reason(choice)
                    if text := _text(choice):
                        yield Generated(text, dict(meta))
        yield Generated("", meta)

    async def select(self, prompt: Prompt, choices: Sequence[str], method: str, hint: Hint) -> Selected:
        """Completions echo a prompt with log probabilities, which is enough for the methods that need no others. A chat
        shows none of its prompt: there, greedy_token_selection lets the model write one of the choices. A single
        choice is not scored."""
        check_choices(choices, method)
        if len(choices) == 1:
            return Selected(0, choices[0], (0.0,))
        if self._chats(prompt):
            return await self._written(prompt, choices, method)
        return await self._scored(prompt, choices, method)

    async def commit(self, prompt: Prompt, hint: Hint) -> None:
        """Nothing: the API knows no such thing."""

    async def release(self, group: str) -> None:
        """Nothing, as nothing is held."""

    async def role_text(self, before: Sequence[Message], role: str) -> Turn:
        return self._roles().around([message.role for message in before], role)

    async def close(self) -> None:
        await self._http.close()

    def _roles(self) -> ChatFormat:
        """In a chat, where the server writes the roles, any format will do to show a program's text."""
        if self._format is None and self._is_chat is False:
            raise BackendError(f"{self!r} writes no roles: say chat_template=")
        return self._format or chat_format("chatml")

    def _chats(self, prompt: Prompt) -> bool:
        """Whether the prompt is one for chat completions. BackendError where it should be and cannot."""
        if prompt.messages is None:
            if self._is_chat:
                raise BackendError(
                    f"{self!r} is a chat model: say all text in roles, and gen in assistant(...)"
                )
            return False
        return self._is_chat is not False

    def _messages(self, prompt: Prompt) -> list[dict[str, str]]:
        messages, text, roles = prompt.messages or (), "", self._roles()
        for i, role in enumerate([*(message.role for message in messages), "assistant"]):
            before, after = roles.around([message.role for message in messages[:i]], role)
            text += before + (messages[i].content + after if i < len(messages) else "")
        if prompt.text != text:
            raise BackendError(
                f"{self!r} cannot go on with a turn that has begun, here with {prompt.text.removeprefix(text)!r}: "
                "gen must be the first in assistant(...)"
            )
        return [{"role": message.role, "content": message.content} for message in messages]

    def _request(self, prompt: Prompt, params: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
        """(path, body) of a call."""
        is_chat = self._chats(prompt)
        body: dict[str, Any] = {"model": self.model}
        for name, value in params.items():
            if value is not None and name != "max_new_tokens":
                body |= self._field(name, value, is_chat)
        limit = params.get("max_new_tokens")
        limit = _DEFAULT_MAX_TOKENS if limit is None else limit
        if is_chat:
            body |= {"messages": self._messages(prompt), "max_completion_tokens": limit}
            return "/chat/completions", body
        return "/completions", body | {"prompt": prompt.text, "max_tokens": limit}

    def _field(self, name: str, value: Any, is_chat: bool) -> dict[str, Any]:
        """A sampling parameter as the API's field."""
        if name in _NAMES:
            return {_NAMES[name]: value}
        if name in self._extensions or (name == "json_schema" and is_chat):
            return _schema(value) if name == "json_schema" else {_EXTENSIONS[name]: value}
        where = "" if is_chat or name != "json_schema" else " of completions"
        hint = (
            f"; where the server takes it, say extensions=[{name!r}]" if name in _EXTENSIONS or where else ""
        )
        raise BackendError(f"{self!r}: {name} is no part of OpenAI's API{where}{hint}")

    async def _written(self, prompt: Prompt, choices: Sequence[str], method: str) -> Selected:
        if method != greedy_token_selection:
            raise BackendError(
                f"{self!r}: a chat tells no log probabilities of its prompt, which {method} needs; "
                f"choices_method={greedy_token_selection!r} works"
            )
        schema = {
            "type": "object",
            "properties": {"choice": {"enum": list(choices)}},
            "required": ["choice"],
            "additionalProperties": False,
        }
        params = {
            "temperature": 0,
            "json_schema": json.dumps(schema),
            "max_new_tokens": 64 + 4 * max(map(len, choices)),
        }
        (written,) = await self.generate(prompt, params, Hint())
        try:
            index = choices.index(json.loads(written.text)["choice"])
        except (ValueError, TypeError, LookupError) as error:
            raise BackendError(
                f"{self!r} was to write one of the choices and wrote {written.text!r}"
            ) from error
        scores = tuple(1.0 if i == index else 0.0 for i in range(len(choices)))
        return Selected(index, choices[index], scores, written.meta)

    async def _scored(self, prompt: Prompt, choices: Sequence[str], method: str) -> Selected:
        if method == unconditional_likelihood_normalized:
            raise BackendError(
                f"{self!r}: {method} needs prompts of token ids, which OpenAI's API does not tell"
            )
        body: dict[str, Any] = {"model": self.model, "prompt": [prompt.text + choice for choice in choices]}
        body |= {"max_tokens": 0, "echo": True, "logprobs": 1, "temperature": 0}
        answer = await self._http.call("POST", "/completions", body)
        rows = [
            choice.get("logprobs") for choice in sorted(answer["choices"], key=lambda choice: choice["index"])
        ]
        if not all(rows):
            raise BackendError(f"{self!r}: the server echoes no log probabilities, which select needs")
        start = shared_tokens([row["tokens"] for row in rows])
        if not start:
            raise nothing_before()
        tails = [Tail(tuple(row["tokens"][start:]), _numbers(row["token_logprobs"][start:])) for row in rows]
        return selected(choices, tails, method, _usage(answer))

    def __repr__(self) -> str:
        return f"OpenAI({self.model!r})"


def _schema(schema: str) -> dict[str, Any]:
    wanted = {"name": "answer", "schema": json.loads(schema), "strict": True}
    return {"response_format": {"type": "json_schema", "json_schema": wanted}}


def _text(choice: Mapping[str, Any]) -> str:
    """Of a completion, a chat's answer, or a part of either."""
    content = choice.get("text")
    if content is None:
        content = (choice.get("message") or choice.get("delta") or {}).get("content")
    return content or ""


def _reason(choice: Mapping[str, Any]) -> dict[str, Any]:
    """In /generate's form."""
    reason = {"type": choice.get("finish_reason")}
    return reason if choice.get("matched_stop") is None else reason | {"matched": choice["matched_stop"]}


def _usage(answer: Mapping[str, Any]) -> dict[str, Any]:
    """In /generate's words."""
    usage = answer.get("usage") or {}
    details = usage.get("prompt_tokens_details") or {}
    found = {name: usage.get(name) for name in ("prompt_tokens", "completion_tokens")}
    found["cached_tokens"] = details.get("cached_tokens")
    return {name: value for name, value in found.items() if value is not None}


def _numbers(logprobs: Sequence[float | None]) -> tuple[float, ...]:
    return tuple(-math.inf if value is None else value for value in logprobs)
