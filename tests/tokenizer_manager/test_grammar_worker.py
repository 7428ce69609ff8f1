"""What the process that looks at grammars says of good ones, of bad ones and of bombs."""

from __future__ import annotations

import io
import json

import msgspec
import pytest
from grammars import byte_vocabulary, matches

from gapless.tokenizer_manager.grammar_frames import Checked, Grammar, read_frame, write_frame
from gapless.tokenizer_manager.grammar_worker import check, serve

TREE = '{"$defs": {"n": {"type": "array", "items": {"$ref": "#/$defs/n"}}}, "$ref": "#/$defs/n"}'
MANY = {f"p{i}": {"type": "string"} for i in range(1000)}
CIRCLE = '{"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}'


def verdict(kind: str, text: str) -> Checked:
    return check(byte_vocabulary(), Grammar(kind, text))


@pytest.mark.parametrize(
    ("kind", "text", "output"),
    [
        ("regex", "(ab|cd)+e", "abcde"),
        ("json_schema", '{"type": "object", "properties": {"a": {"enum": ["x", 1]}}}', '{"a": "x"}'),
        ("json_schema", TREE, "[[], [[]]]"),
        ("json_schema", '{"type": "array", "items": {"type": "integer"}, "maxItems": 1000000000000000000}', "[1, 2]"),
        ("json_schema", '{"type": "array", "items": ' * 49 + "{}" + "}" * 49, "[[]]"),
        ("ebnf", 'root ::= "(" root ")" | "a"', "((a))"),
        ("ebnf", 'start: "(" start ")" | "a"', "((a))"),
        ("regex", "(a{1,500}){1,500}", "aaaa"),
    ],
)  # fmt: skip
def test_a_good_grammar_comes_back_in_lark(kind: str, text: str, output: str) -> None:
    found = verdict(kind, text)
    assert not found.error
    assert matches(found.lark, output)


@pytest.mark.parametrize(
    ("kind", "text", "error"),
    [
        ("regex", "[", "unclosed character class"),
        ("regex", "(?=a)b", "look-around"),
        ("regex", r"(a)\1", "backreferences are not supported"),
        ("json_schema", "{", "not valid JSON"),
        ("json_schema", '{"$ref": "#"}', "no output can match it"),
        ("json_schema", CIRCLE, "no output can match it"),
        ("json_schema", '{"$ref": "#/$defs/x"}', "'/$defs/x' does not exist"),
        ("json_schema", '{"$ref": "http://example.com/schema"}', "does not fetch"),
        ("json_schema", '{"type": "foo"}', "Invalid type: foo"),
        ("json_schema", '{"type": "array", "uniqueItems": true}', 'Unimplemented keys: ["uniqueItems"]'),
        ("json_schema", '{"allOf": [{"type": "string"}, {"type": "integer"}]}', "Unsatisfiable"),
        ("ebnf", "root ::= x", "`x`, which is not defined"),
        ("ebnf", 'start: x\ny: "a"', 'unknown name: "x"'),
        ("ebnf", "nonsense", "should begin here"),
    ],
)  # fmt: skip
def test_a_bad_grammar_comes_back_with_the_reason(kind: str, text: str, error: str) -> None:
    found = verdict(kind, text)
    assert (found.lark, error in found.error) == ("", True), found.error
    assert "<state>" not in found.error
    assert "backtrace" not in found.error


def test_the_place_of_a_mistake_is_shown_in_the_clients_own_text_alone() -> None:
    assert "1 | start: x" in verdict("ebnf", "start: x").error
    assert "start:" not in verdict("regex", "[").error


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("json_schema", json.dumps({"type": "object", "properties": MANY})),
        ("regex", "((((a{1,100}){1,100}){1,100}){1,100}){1,100}"),
    ],
)  # fmt: skip
def test_a_grammar_that_would_fail_at_its_first_tokens_is_refused(kind: str, text: str) -> None:
    assert "items" in (error := verdict(kind, text).error) or "too many" in error


def test_frames_are_answered_in_order_until_the_other_side_is_gone() -> None:
    requests, answers = io.BytesIO(), io.BytesIO()
    for text in ("[", "a"):
        write_frame(requests, msgspec.msgpack.encode(Grammar("regex", text)))
    requests.write(b"\x05\0")  # half a frame
    requests.seek(0)
    serve(requests, answers)
    answers.seek(0)
    ready, bad, good = (msgspec.msgpack.decode(read_frame(answers) or b"", type=Checked) for _ in range(3))
    assert ready == Checked()
    assert bad.error
    assert good.lark
    assert read_frame(answers) is None
