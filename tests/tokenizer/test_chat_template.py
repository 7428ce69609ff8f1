"""Chat templates: which one counts, what the built-in ones write, and that a template's code stays in its bounds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from gapless.runtime.core.config import CHAT_TEMPLATES, ServerConfig
from gapless.runtime.core.errors import ConfigError
from gapless.runtime.tokenizer import chat_template_render
from gapless.runtime.tokenizer.byte_tokenizer import ByteTokenizer
from gapless.runtime.tokenizer.chat_template import (
    ChatTemplate,
    TemplateError,
    chat_template,
    read_template,
    tool_format,
)
from gapless.runtime.tokenizer.chat_template_builtin import BUILTIN
from gapless.runtime.tokenizer.chat_template_process import Renderer
from gapless.runtime.tokenizer.chat_template_render import Rendering

SYSTEM, USER, ASSISTANT, TOOL = (
    {"role": role, "content": text}
    for role, text in (("system", "Be brief."), ("user", "Hi"), ("assistant", "Hello"), ("tool", "7"))
)
CALLS = [
    {"id": "c1", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}},
    {"id": "c2", "type": "function", "function": {"name": "g", "arguments": {}}},
]
CALLING = {"role": "assistant", "content": "", "tool_calls": CALLS}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
TOKENS = {"bos_token": "<B>", "eos_token": "<E>"}


def render(name: str, *messages: dict[str, Any], **variables: Any) -> str:
    rendering = Rendering(ChatTemplate(BUILTIN[name], TOKENS))
    return rendering.render({"messages": list(messages), "add_generation_prompt": True, **variables})


@pytest.mark.parametrize(
    ("name", "prompt"),
    [
        (
            "chatml",
            "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello"
            "<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
        ),
        (
            "gemma",
            "<B><start_of_turn>user\nBe brief.\n\nHi<end_of_turn>\n<start_of_turn>model\nHello<end_of_turn>\n"
            "<start_of_turn>user\nHi<end_of_turn>\n<start_of_turn>model\n",
        ),
        (
            "llama-3",
            "<B><|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|>"
            "<|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>"
            "<|start_header_id|>assistant<|end_header_id|>\n\nHello<|eot_id|>"
            "<|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
        ),
        ("mistral", "<B>[INST] Hi[/INST] Hello<E>[INST] Be brief.\n\nHi[/INST]"),
    ],
)
def test_a_conversation(name: str, prompt: str) -> None:
    assert render(name, SYSTEM, USER, ASSISTANT, USER) == prompt


@pytest.mark.parametrize("tools", [None, TOOLS])
@pytest.mark.parametrize("name", BUILTIN)
def test_transformers_renders_the_same(name: str, tools: Any) -> None:
    """Its names, filters and white space are ours."""
    messages = [SYSTEM, USER, CALLING, TOOL, TOOL, ASSISTANT, USER]
    (theirs,), _ = render_jinja_template(
        conversations=[messages],
        tools=tools,
        chat_template=BUILTIN[name],
        add_generation_prompt=True,
        **TOKENS,
    )
    assert render(name, *messages, tools=tools) == theirs


def test_without_a_generation_prompt() -> None:
    assert render("chatml", USER, add_generation_prompt=False) == "<|im_start|>user\nHi<|im_end|>\n"


@pytest.mark.parametrize(
    ("name", "calls", "results"),
    [
        (
            "chatml",
            '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>\n'
            '<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call><|im_end|>',
            "<tool_response>\n7\n</tool_response>",
        ),
        (
            "gemma",
            '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>\n'
            '<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call><end_of_turn>',
            "<tool_response>\n7\n</tool_response>\n<tool_response>\n7\n</tool_response><end_of_turn>",
        ),
        (
            "llama-3",
            '{"name": "f", "parameters": {"x": 1}}; {"name": "g", "parameters": {}}<|eot_id|>',
            "<|start_header_id|>ipython<|end_header_id|>\n\n7<|eot_id|>",
        ),
        (
            "mistral",
            '[TOOL_CALLS] [{"name": "f", "arguments": {"x": 1}, "id": "c1"}, '
            '{"name": "g", "arguments": {}, "id": "c2"}]<E>',
            '[TOOL_RESULTS] {"content": "7"}[/TOOL_RESULTS]',
        ),
    ],
)
def test_tools_and_their_calls_and_results(name: str, calls: str, results: str) -> None:
    prompt = render(name, USER, CALLING, TOOL, TOOL, ASSISTANT, USER, tools=TOOLS)
    assert calls in prompt
    assert results in prompt
    assert '"name": "f"' in prompt.replace(calls, "")  # the tool is described
    assert tool_format(BUILTIN[name]) == {"llama-3": "llama3", "mistral": "mistral"}.get(name, "hermes")


@pytest.mark.parametrize("name", BUILTIN)
def test_an_unknown_role_is_refused(name: str) -> None:
    with pytest.raises(TemplateError, match="unknown role: wizard"):
        render(name, USER, {"role": "wizard", "content": "x"})


@pytest.mark.parametrize("name", BUILTIN)
def test_a_late_system_message_is_refused(name: str) -> None:
    with pytest.raises(TemplateError, match="a system message must be the first"):
        render(name, USER, SYSTEM)


@pytest.mark.parametrize("name", ["gemma", "mistral"])
def test_two_user_messages_in_a_row_are_refused(name: str) -> None:
    with pytest.raises(TemplateError, match="roles must alternate"):
        render(name, USER, USER)


def test_which_template_counts(tmp_path: Path) -> None:
    file = tmp_path / "own.jinja"
    file.write_text("{{ eos_token }}")
    tokenizer = ByteTokenizer()
    assert chat_template(read_template(""), tokenizer) is None
    tokenizer.chat_template = "the model's"
    assert chat_template(read_template(""), tokenizer) == ChatTemplate("the model's", {"eos_token": "<eos>"})
    given = chat_template(read_template(str(file)), tokenizer)
    assert given is not None
    assert Rendering(given).render({}) == "<eos>"
    assert {read_template(name) for name in CHAT_TEMPLATES} == set(BUILTIN.values())


def test_a_template_that_is_not_there_is_refused_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--chat-template"):
        ServerConfig(chat_template="chatlm")
    (tmp_path / "latin.jinja").write_bytes(b"\xff\xfe\xff")
    with pytest.raises(ConfigError, match="not a text"):
        read_template(str(tmp_path / "latin.jinja"))


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ x | tojson }}", '{"a": "<é>"}'),
        ("{{ x | tojson(indent=1) }}", '{\n "a": "<é>"\n}'),
        ("{% for i in [1, 2, 3] %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "1"),
        ("a{% generation %}b{% endgeneration %}c", "abc"),
        ("{{ strftime_now('%Y') | length }}", "4"),
        ("  {% if true %}\nx\n  {% endif %}\n", "x\n"),
    ],
)
def test_what_templates_of_models_use(source: str, text: str) -> None:
    assert Rendering(ChatTemplate(source)).render({"x": {"a": "<é>"}}) == text


@pytest.mark.parametrize(
    ("source", "error"),
    [
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ ''['__class__'].x }}", "unsafe|undefined"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ messages.clear() }}", "unsafe"),
        ("{{ raise_exception('no wizards') }}", "^no wizards$"),
        ("{{ absent.content }}", "'absent' is undefined"),
        ("{{ 1 + 'a' }}", "TypeError"),
        ("{{ 1 // 0 }}", "ZeroDivisionError"),
        ("{% if %}", "cannot be read"),
        ("{% include '/etc/passwd' %}", "loader|TypeError"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "RecursionError"),
        ("{{ range(10 ** 9) | list }}", "Range too big"),
    ],
)
def test_what_a_template_does_wrong_is_said(source: str, error: str) -> None:
    with pytest.raises(TemplateError, match=error):
        Rendering(ChatTemplate(source)).render({"messages": [1]})


def test_a_prompt_has_a_longest_length(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template_render, "MAX_PROMPT_CHARS", 3)
    assert Rendering(ChatTemplate("abc")).render({}) == "abc"
    with pytest.raises(TemplateError, match="longer than 3"):
        Rendering(ChatTemplate("abcd")).render({})


_LOOP = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
_DOUBLING = "{% set ns = namespace(s='ab') %}{% for i in range(60) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}"


@pytest.mark.parametrize(
    ("bomb", "error"),
    [
        (_LOOP, "took more than"),
        (_DOUBLING, "MemoryError|took more"),
        ("{{ 'a' * 10 ** 11 }}", "MemoryError|took more"),
        ("{{ '%99999999999d' % 1 }}", "MemoryError|took more|OverflowError|ValueError"),
    ],
)
def test_a_template_without_end_is_ended_and_the_next_prompt_is_rendered(bomb: str, error: str) -> None:
    renderer = Renderer(ChatTemplate("{% if bomb %}" + bomb + "{% endif %}{{ text }}"))
    assert renderer.render({"text": "é\n\x00"}) == "é\n\x00"
    with pytest.raises(TemplateError, match=error):
        renderer.render({"bomb": True})
    assert renderer.render({"text": "still here"}) == "still here"


def test_a_template_that_is_a_bomb_when_it_is_read() -> None:
    with pytest.raises(TemplateError):
        Renderer(ChatTemplate("{{ 'a' * 10 ** 11 }}")).render({})
