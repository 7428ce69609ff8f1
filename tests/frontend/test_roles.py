"""What chat templates write around turns, cut from whole conversations, and the formats by name."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from gapless.frontend.backends.base import BackendError
from gapless.frontend.backends.roles import RoleTexts
from gapless.frontend.backends.templates import FORMATS, chat_format, format_of_model
from gapless.runtime.tokenizer.chat_template import ChatTemplate, TemplateError
from gapless.runtime.tokenizer.chat_template_builtin import BUILTIN
from gapless.runtime.tokenizer.chat_template_render import Rendering

BOS = "<bos>"
CONTENTS = {"system": "Be brief.", "user": "Why?", "assistant": "Because."}
CHATS = [
    ["user"],
    ["system", "user"],
    ["user", "assistant", "user"],
    ["system", "user", "assistant", "user"],
    ["system", "user", "assistant", "user", "assistant", "user"],
]


class Templates:
    """Renders by `source`, as a server does."""

    def __init__(self, source: str) -> None:
        self._rendering = Rendering(ChatTemplate(source, {"bos_token": BOS, "eos_token": "</s>"}))
        self.texts = RoleTexts(self.render, self.without_bos)
        self.calls = 0

    def prompt(self, roles: Sequence[str], *, generation: bool = True) -> str:
        messages = [{"role": role, "content": CONTENTS[role]} for role in roles]
        variables: dict[str, Any] = {"messages": messages, "tools": None, "add_generation_prompt": generation}
        return self._rendering.render(variables)

    async def render(self, messages: list[dict[str, str]], generation: bool) -> str:
        self.calls += 1
        try:
            return self._rendering.render(
                {"messages": messages, "tools": None, "add_generation_prompt": generation}
            )
        except TemplateError as error:
            raise BackendError(f"chat template: {error}", 400) from error

    async def without_bos(self, text: str) -> str:
        return text.removeprefix(BOS)

    async def written(self, roles: Sequence[str]) -> str:
        """A program that says these turns, and then begins an assistant's."""
        text = ""
        for i, role in enumerate(roles):
            before, after = await self.texts.around(roles[:i], role)
            text += before + CONTENTS[role] + after
        return text + (await self.texts.around(roles, "assistant"))[0]


@pytest.mark.parametrize("name", BUILTIN)
@pytest.mark.parametrize("roles", CHATS, ids=" ".join)
def test_a_program_in_roles_writes_what_a_chat_is_made_into(name: str, roles: list[str]) -> None:
    """Mistral's template moves the system's turn to the last user's: there, it stays with the first."""
    templates = Templates(BUILTIN[name])
    written = asyncio.run(templates.written(roles))
    want = templates.prompt(roles).removeprefix(BOS)
    if name == "mistral" and "assistant" in roles:  # and it writes a space before an answer that is given
        want = want.replace("[/INST] Because", "[/INST]Because")
        if roles[0] == "system":
            want = "[INST] Be brief.\n\n" + want.replace("Be brief.\n\n", "").removeprefix("[INST] ")
    assert written == want


@pytest.mark.parametrize("name", BUILTIN)
@pytest.mark.parametrize("roles", [*CHATS, ["assistant"]], ids=" ".join)
def test_the_formats_by_name_are_the_templates(name: str, roles: list[str]) -> None:
    templates = Templates(BUILTIN[name])
    if roles == ["assistant"]:
        assert FORMATS[name].around([], "assistant") == FORMATS[name].around(["user"], "assistant")
        return

    async def check() -> None:
        for i, role in enumerate([*roles, "assistant"]):
            assert FORMATS[name].around(roles[:i], role) == await templates.texts.around(roles[:i], role)

    asyncio.run(check())


def test_a_template_that_refuses_says_why() -> None:
    gemma = Templates(BUILTIN["gemma"])
    with pytest.raises(BackendError, match="roles must alternate") as caught:
        asyncio.run(gemma.written(["user", "user"]))
    assert caught.value.status == 400
    no_system = "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    with pytest.raises(BackendError, match="no system role"):
        asyncio.run(Templates(no_system + BUILTIN["chatml"]).written(["system", "user"]))
    with pytest.raises(BackendError, match="a system message must be the first"):
        asyncio.run(Templates(BUILTIN["llama-3"]).written(["user", "system"]))


def test_a_template_without_a_place_for_a_turn() -> None:
    user_only = "{% for m in messages if m.role == 'user' %}[{{ m.content }}]{% endfor %}"
    with pytest.raises(BackendError, match="no place for a system turn"):
        asyncio.run(Templates(user_only).written(["system", "user"]))


def test_a_template_that_ends_a_turn_otherwise_once_another_follows() -> None:
    source = "{% for m in messages %}{{ m.role }}:{{ m.content }}{{ '!' if loop.last else '?' }}{% endfor %}"
    with pytest.raises(BackendError, match="ended with '!'"):
        asyncio.run(Templates(source).written(["user", "user"]))


def test_a_template_that_drops_what_an_assistant_thought() -> None:
    """Only the text between the turns counts: what a program has said stays as it is."""
    source = (
        "{% for m in messages %}<{{ m.role }}>"
        "{{ '<think></think>' if m.role == 'assistant' and loop.last }}{{ m.content }}</end>{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    written = asyncio.run(Templates(source).written(["user", "assistant", "user"]))
    assert written == "<user>Why?</end><assistant>Because.</end><user>Why?</end><assistant>"


def test_each_sequence_of_roles_is_asked_for_once() -> None:
    templates = Templates(BUILTIN["chatml"])

    async def many() -> None:
        await asyncio.gather(*(templates.written(["system", "user"]) for _ in range(50)))

    asyncio.run(many())
    assert templates.calls == 4  # each turn alone, and the assistant's once more, as generation begins it


def test_a_failure_is_not_kept_and_a_cancelled_caller_spoils_nothing() -> None:
    calls = 0

    async def render(messages: list[dict[str, str]], generation: bool) -> str:
        nonlocal calls
        calls += 1
        await asyncio.sleep(0)
        if calls == 1:
            raise BackendError("the server is loading", 503)
        return f"<{messages[0]['content']}>"

    async def same(text: str) -> str:
        return text

    async def check() -> None:
        texts = RoleTexts(render, same)
        with pytest.raises(BackendError, match="loading"):
            await texts.around([], "user")
        first = asyncio.create_task(texts.around([], "user"))
        second = asyncio.create_task(texts.around([], "user"))
        await asyncio.sleep(0)
        first.cancel()
        assert await second == ("<", ">")

    asyncio.run(check())
    assert calls == 2


def test_what_is_kept_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gapless.frontend.backends.roles.MAX_CACHED", 3)
    templates = Templates(BUILTIN["chatml"])
    roles = ["user", "assistant"] * 4
    asyncio.run(templates.written(roles))
    assert len(templates.texts._known) == 3
    assert asyncio.run(templates.written(roles)) == templates.prompt(roles)


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("Qwen/Qwen3-8B", "chatml"),
        ("meta-llama/Llama-3.1-8B-Instruct", "llama-3"),
        ("/models/gemma-3-270m-it", "gemma"),
        ("mistralai/Mixtral-8x7B-Instruct-v0.1", "mistral"),
    ],
)
def test_a_format_is_told_by_the_models_path(path: str, name: str) -> None:
    assert format_of_model(path) is FORMATS[name]


def test_an_unknown_format_or_model_is_named() -> None:
    with pytest.raises(ValueError, match=r"'alpaca'.*chatml"):
        chat_format("alpaca")
    with pytest.raises(BackendError, match="chat_template=, one of chatml"):
        format_of_model("toy")
    with pytest.raises(BackendError, match="unknown role: 'tool'"):
        FORMATS["chatml"].around([], "tool")
    with pytest.raises(BackendError, match="must be the first"):
        FORMATS["gemma"].around(["user"], "system")
    with pytest.raises(BackendError, match="a user turn must follow"):
        FORMATS["gemma"].around(["system"], "assistant")
