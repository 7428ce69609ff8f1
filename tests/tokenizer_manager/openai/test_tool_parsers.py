"""Tool calls in text: what is found does not depend on the pieces in which the text comes."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gapless.tokenizer_manager.openai.tool_forced import ListParser, NamedParser
from gapless.tokenizer_manager.openai.tool_hermes import HermesParser
from gapless.tokenizer_manager.openai.tool_llama3 import Llama3Parser
from gapless.tokenizer_manager.openai.tool_mistral import MistralParser
from gapless.tokenizer_manager.openai.tool_parser import Call, Item, ToolParser

NAMES = ("f", "get_weather", "no-args")
F1 = Call("f", '{"x": 1}')
PARIS = Call("get_weather", '{"city": "Paris", "note": "a \\"b\\" } ] </tool_call> {"}')
EMPTY = Call("no-args", "{}")


NAN = '{"x": NaN}'


def parse(parser: ToolParser, pieces: Iterable[str]) -> list[Item]:
    """The items with text joined."""
    items = [item for piece in pieces for item in parser.push(piece)] + parser.finish()
    joined: list[Item] = []
    for item in items:
        if isinstance(item, str) and joined and isinstance(joined[-1], str):
            joined[-1] += item
        else:
            joined.append(item)
    return joined


def json_call(call: Call, key: str = "arguments") -> str:
    return f'{{"name": "{call.name}", "{key}": {call.arguments}}}'


def hermes(call: Call) -> str:
    return f"<tool_call>\n{json_call(call)}\n</tool_call>"


CASES: list[tuple[type[ToolParser], str, list[Item]]] = [
    (HermesParser, "no call, 1 < 2 ", ["no call, 1 < 2 "]),
    (HermesParser, f"Sure.\n{hermes(F1)}\n{hermes(PARIS)}\n", ["Sure.", F1, PARIS]),
    (HermesParser, hermes(EMPTY), [EMPTY]),
    (HermesParser, '<tool_call>{"name": "no-args"}</tool_call>', [EMPTY]),
    (HermesParser, '<tool_call>{"name": "no-args", "arguments": null}</tool_call>', [EMPTY]),
    (HermesParser, '<tool_call>{"name": "f", "arguments": "{\\"x\\": 1}"}</tool_call>', [F1]),
    (HermesParser, f"{hermes(F1)} and\nthen", [F1, " and\nthen"]),
    (HermesParser, f"<tool_call>{json_call(F1)}", [F1]),
    (HermesParser, f"<tool_call>{json_call(F1)}</tool", [F1]),
    (HermesParser, f"<tool_call>{json_call(F1)}<tool_call>{json_call(EMPTY)}", [F1, EMPTY]),
    (HermesParser, f"<tool_call><tool_call>{json_call(F1)}</tool_call>", ["<tool_call>", F1]),
    (HermesParser, '<tool_call>{"name": "f", "arg', ['<tool_call>{"name": "f", "arg']),
    (HermesParser, "a\n<tool_call>", ["a\n<tool_call>"]),
    (HermesParser, "<tool_cal", ["<tool_cal"]),
    (HermesParser, '<tool_call>{"name": "g"}</tool_call>', ['<tool_call>{"name": "g"}</tool_call>']),
    (HermesParser, '<tool_call>{"name": f}</tool_call>', ['<tool_call>{"name": f}</tool_call>']),
    (HermesParser, '<tool_call>{"name": "f", "arguments": [1]}', ['<tool_call>{"name": "f", "arguments": [1]}']),
    (HermesParser, '<tool_call>{"name": "f", "arguments": {"x": NaN}}', [f'<tool_call>{json_call(Call("f", NAN))}']),
    (Llama3Parser, json_call(F1, "parameters"), [F1]),
    (Llama3Parser, f" <|python_tag|>{json_call(F1, 'parameters')}; {json_call(PARIS, 'parameters')}", [F1, PARIS]),
    (Llama3Parser, f"Sure. <|python_tag|>{json_call(EMPTY, 'parameters')}", ["Sure.", EMPTY]),
    (Llama3Parser, json_call(EMPTY) + ";\n", [EMPTY]),
    (Llama3Parser, json_call(EMPTY) + "; done", [EMPTY, "; done"]),
    (Llama3Parser, '{"answer": 42}', ['{"answer": 42}']),
    (Llama3Parser, '{"name": "f", "parameters": {"x"', ['{"name": "f", "parameters": {"x"']),
    (Llama3Parser, "Hello { there", ["Hello { there"]),
    (Llama3Parser, "<|python", ["<|python"]),
    (MistralParser, f"[TOOL_CALLS] [{json_call(F1)}, {json_call(PARIS)}]", [F1, PARIS]),
    (MistralParser, f"[TOOL_CALLS]{json_call(F1)}", [F1]),
    (MistralParser, 'Sure. [TOOL_CALLS]f[ARGS]{"x": 1}[TOOL_CALLS]no-args[ARGS]{}', ["Sure.", F1, EMPTY]),
    (MistralParser, '[TOOL_CALLS]f{"x": 1}', [F1]),
    (MistralParser, '[TOOL_CALLS]f[CALL_ID]abc[ARGS]{"x": 1}', [F1]),
    (MistralParser, '[TOOL_CALLS]g[ARGS]{"x": 1}', ['[TOOL_CALLS]g[ARGS]{"x": 1}']),
    (MistralParser, "[TOOL_CALLS] none (really)", ["[TOOL_CALLS] none (really)"]),
    (MistralParser, f"[TOOL_CALLS] [{json_call(F1)}, {{", [F1, "{"]),
    (MistralParser, "[1, 2]", ["[1, 2]"]),
    (ListParser, f"[{json_call(F1)},{json_call(PARIS)}]", [F1, PARIS]),
    (ListParser, f'[{json_call(F1)}, {{"name": "get_', [F1, '{"name": "get_']),
]  # fmt: skip


@pytest.mark.parametrize(("parser", "text", "items"), CASES)
def test_what_is_found(parser: type[ToolParser], text: str, items: list[Item]) -> None:
    assert parse(parser(NAMES), [text]) == items
    assert parse(parser(NAMES), text) == items  # character by character
    for item in items:
        assert isinstance(item, str) or isinstance(json.loads(item.arguments), dict)


def pieces_of(text: str, cuts: Sequence[int]) -> list[str]:
    at = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    return [text[a:b] for a, b in itertools.pairwise(at)]


CUTS = st.lists(st.integers(0, 10_000), max_size=12)


@given(st.sampled_from(CASES), CUTS, st.integers(0, 10_000))
def test_pieces_do_not_matter_wherever_the_text_is_cut_off(
    case: tuple[type[ToolParser], str, list[Item]], cuts: list[int], length: int
) -> None:
    parser, text, _ = case
    text = text[: length % (len(text) + 1)]
    assert parse(parser(NAMES), pieces_of(text, cuts)) == parse(parser(NAMES), [text])


FRAGMENTS = st.sampled_from(
    ["<tool_call>", "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "[", "]", "{", "}", ";",
     ",", " ", "\n", '"', "\\", "f", "get_weather", '{"name": "f"}', '{"name":"f","arguments":{"x": "}"}}', "<", "é"]
)  # fmt: skip


@given(
    st.sampled_from([HermesParser, Llama3Parser, MistralParser, ListParser]),
    st.lists(FRAGMENTS, max_size=20).map("".join),
    CUTS,
)
def test_pieces_do_not_matter_in_any_text(parser: type[ToolParser], text: str, cuts: list[int]) -> None:
    whole = parse(parser(NAMES), [text])
    assert parse(parser(NAMES), pieces_of(text, cuts)) == whole
    assert parse(parser(NAMES), text) == whole
    for item in whole:
        assert isinstance(item, str) or isinstance(json.loads(item.arguments), dict)


@given(st.text(alphabet="ab <[{\n|", max_size=40), CUTS)
def test_text_without_a_call_is_left_as_it_is(text: str, cuts: list[int]) -> None:
    for parser in (HermesParser, Llama3Parser, MistralParser):
        assert "".join(map(str, parse(parser(NAMES), pieces_of(text, cuts)))) == text


@pytest.mark.parametrize(
    ("text", "items"),
    [
        ('{"x": 1}', [F1]),
        ("{}", [Call("f", "{}")]),
        ('{"x": ', ['{"x": ']),
        ("", []),
    ],
)
def test_a_named_tools_output_is_its_arguments(text: str, items: list[Item]) -> None:
    assert parse(NamedParser(["f"]), text) == items
