"""JSON schemas, regular expressions and Lark in one form, and what that form lets an output be."""

from __future__ import annotations

import pytest
from grammars import matches

from gapless.runtime.core.grammar_text import to_lark

PERSON = """{"type": "object", "properties": {"b": {"type": "integer"}, "a": {"type": "string", "pattern": "^x/"}},
             "required": ["b", "a"], "additionalProperties": false}"""


@pytest.mark.parametrize(
    ("regex", "good", "bad"),
    [
        ("(ab|cd)+e", ["abe", "abcde"], ["e", "abee"]),
        ("^ab$", ["ab"], ["b"]),
        ("a/b", ["a/b"], ["a"]),
        (r"a\/b", ["a/b"], [r"a\/b"]),
        ("[/]", ["/"], ["a"]),
        (r"\\/", ["\\/"], ["/"]),
        ("a\nb", ["a\nb"], ["ab"]),
        ("\\\n", ["\n"], ["\\"]),
        ("", [""], ["a"]),
        (r"\d{3}|é", ["123", "é"], ["12", "e"]),
    ],
)
def test_a_regular_expression_matches_the_whole_output(regex: str, good: list[str], bad: list[str]) -> None:
    lark = to_lark("regex", regex)
    assert [text for text in good if not matches(lark, text)] == []
    assert [text for text in bad if matches(lark, text)] == []


def test_between_the_tokens_of_json_there_is_at_most_one_space() -> None:
    lark = to_lark("json_schema", PERSON)
    for text in ('{"b":1,"a":"x/"}', '{"b": 1, "a": "x/"}', '{ "b" : 1 , "a" : "x/y" }'):
        assert matches(lark, text)
    for text in ('{"b":  1, "a": "x/"}', ' {"b":1,"a":"x/"}', '{"b":1,"a":"x/"} ', '{"b":\n1,"a":"x/"}'):
        assert not matches(lark, text)


def test_properties_come_in_the_order_of_the_schema() -> None:
    assert not matches(to_lark("json_schema", PERSON), '{"a":"x/","b":1}')


def test_a_schema_may_bring_its_own_whitespace() -> None:
    lark = to_lark("json_schema", '{"type": "array", "x-guidance": {"whitespace_pattern": "[ \\n]{0,3}"}}')
    assert matches(lark, "[\n  1]")
    assert not matches(lark, "[    1]")


def test_true_stands_for_any_json() -> None:
    assert matches(to_lark("json_schema", "true"), '{"a": [null, "b"]}')


@pytest.mark.parametrize("text", ["{", "[]", "1", '"a"', "false", "null", "", "NaN", "{} {}"])
def test_what_is_no_schema_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="JSON"):
        to_lark("json_schema", text)


@pytest.mark.parametrize(
    "lark",
    ['start: "a" b\nb: /[0-9]/', '  start : "a" B\nB: /[0-9]/', '%llguidance {}\nstart: "a" /[0-9]/'],
)
def test_lark_is_taken_as_it_is(lark: str) -> None:
    assert matches(to_lark("ebnf", lark), "a5")


def test_no_grammar_forces_tokens() -> None:
    """Each way to spell "abc" in tokens may come, whatever the text asks for: ours is the last word."""
    lark = to_lark("ebnf", '%llguidance {"no_forcing": false}\nstart: "abc"')
    assert matches(lark, "abc")
