"""GBNF means the same after its translation; what cannot be read is refused with its line."""

from __future__ import annotations

import re
from typing import Any

import pytest
from grammars import matches
from hypothesis import given, settings
from hypothesis import strategies as st

from gapless.runtime.core.gbnf import GrammarSyntaxError, gbnf_to_lark
from gapless.runtime.core.grammar_text import to_lark

JSON = r"""
# A grammar as llama.cpp ships them: recursive, with sets, escapes and a nullable rule.
root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws
object ::=
  "{" ws (
    string ":" ws value
    ("," ws string ":" ws value)*
  )? "}" ws
array  ::= "[" ws ( value ("," ws value)* )? "]" ws
string ::= "\"" ( [^"\\\x7F\x00-\x1F] | "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) )* "\"" ws
number ::= "-"? ([0-9] | [1-9] [0-9]{1,15}) ("." [0-9]+)? ([eE] [-+]? [0-9]+)? ws
ws ::= | " " | "\n" [ \t]{0,20}
"""


@pytest.mark.parametrize(
    ("grammar", "good", "bad"),
    [
        ('root ::= "yes" | "no"', ["yes", "no"], ["", "y", "yesno"]),
        ('root ::= "a" |', ["a", ""], ["b"]),
        ('root ::= ("x" | )* [^"\\\\\\x00-\\x1f]{2}', ["xxéé", "ab"], ['x"', "a"]),
        ("root ::= .{1,2}", ["é\n", "\n"], ["", "abc"]),
        ('root ::= "a"{2} "b"{1,} "c"{ 0 , 2 }', ["aab", "aabbbcc"], ["ab", "aabccc"]),
        ("root ::= [z-] [\\]\\[a-c]+ [^-x]", ["z]a", "-[bq"], ["ya", "z]-"]),
        ('root ::= "\\x41\\u00e9\\U0001F600\\t\\"\\\\"', ['Aé😀\t"\\'], ["Ae"]),
        ("root ::= a-b c_D\na-b ::= [0-9]\nc_D ::= a-b a-b", ["123"], ["12", "1234"]),
        ('root ::= "(" root ")" | "a"', ["a", "((a))"], ["((a)", "()"]),
        ('root ::= e\ne ::= t ("+" t)*\nt ::= [0-9]+ | "(" e ")"', ["1+(2+34)", "7"], ["1+", "(1"]),
        ('root ::= ws r ws\nr ::= "(" r ")" | ws "b" ws\nws ::= [ \\n]*', ["  (( b )) ", "b"], ["(b"]),
        (JSON, ['{"a": [1,2.5e3,"x\\n"], "b":{}}', "{}", '{\n\t"k": true }'], ['{"a"}', "[]", '{"a":01}']),
    ],
)
def test_a_grammar_accepts_what_it_says(grammar: str, good: list[str], bad: list[str]) -> None:
    lark = to_lark("ebnf", grammar)
    assert [text for text in good if not matches(lark, text)] == []
    assert [text for text in bad if matches(lark, text)] == []


@pytest.mark.parametrize(
    ("grammar", "message"),
    [
        ("", "no rule `root`"),
        ('a ::= "b"', "no rule `root`"),
        ("root ::= b", "`b`, which is not defined"),
        ("root ::= (", "line 1: this `(` is not closed"),
        ('root ::= "a" )', "line 1: this `)` closes nothing"),
        ('root ::= "a"\nb ::= *', "line 2: `*` repeats nothing"),
        ('root ::= "a"**', "`*` repeats nothing"),
        ('root ::= ("a" | +)', "`+` repeats nothing"),
        ('root ::= "a"\n\nroot ::= "b"', "line 3: rule `root` is defined twice"),
        ("root ::= [b-a]", "ends before it begins"),
        ("root ::= []", "empty"),
        ('root ::= "\\q"', "unknown escape `\\q`"),
        ('root ::= "\\ud800"', "is no character"),
        ('root ::= "\\U00110000"', "is no character"),
        ('root = "a"', "`=` should not stand here"),
        ('root ::= "a', '`"` should not stand here'),
        ("root ::= 'a'", "`'` should not stand here"),
        ('"a" ::= root', "should begin here"),
        ('root ::= "a" ::= "b"', "should begin here"),
    ],
)
def test_a_mistake_is_named(grammar: str, message: str) -> None:
    with pytest.raises(GrammarSyntaxError, match=re.escape(message)):
        gbnf_to_lark(grammar)


Pair = tuple[str, str]  # an expression in GBNF and as a regular expression of Python


def _joined(parts: list[Pair], between: Pair) -> Pair:
    gbnf, regex = zip(*parts, strict=True)
    return f"({between[0].join(gbnf)})", f"(?:{between[1].join(regex)})"


LEAVES = st.sampled_from(
    [
        ('"a"', "a"),
        ('"ab"', "ab"),
        ("[a-b]", "[a-b]"),
        ("[^a]", "[^a]"),
        ("letter", "[ac]"),
        ('""', ""),
        (".", "(?s:.)"),
    ]
)
EXPRESSIONS = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, min_size=1, max_size=3).map(lambda parts: _joined(parts, (" ", ""))),
        st.lists(inner, min_size=1, max_size=3).map(lambda parts: _joined(parts, (" | ", "|"))),
        st.tuples(inner, st.sampled_from(["*", "+", "?", "{2}", "{1,2}", "{0,}"])).map(
            lambda pair: (f"({pair[0][0]}){pair[1]}", f"(?:{pair[0][1]}){pair[1]}")
        ),
    ),
    max_leaves=8,
)


@settings(max_examples=150)
@given(expression=EXPRESSIONS, texts=st.lists(st.text("abc\n", max_size=6), min_size=1, max_size=8))
def test_without_recursion_it_is_the_regular_expression(expression: Any, texts: list[str]) -> None:
    gbnf, regex = expression
    lark = to_lark("ebnf", f"root ::= {gbnf}\nletter ::= [ac]\n")
    for text in texts:
        assert matches(lark, text) == bool(re.fullmatch(regex, text)), (gbnf, text)
