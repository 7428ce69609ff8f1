"""What can be appended, and what is refused before anything runs."""

from __future__ import annotations

import re

import pytest

import gapless
from gapless.frontend.expressions import Concatenation, Gen, RoleBegin, RoleEnd, Select, leaves


def test_text_and_expressions_add_up_in_order() -> None:
    a, b = gapless.gen("a"), gapless.gen("b")
    assert leaves("1" + a + "2" + (b + "3")) == ("1", a, "2", b, "3")
    assert leaves(gapless.user("hi")) == (RoleBegin("user"), "hi", RoleEnd("user"))
    assert leaves(gapless.assistant()) == (RoleBegin("assistant"), RoleEnd("assistant"))
    assert leaves(gapless.system_begin() + "x" + gapless.system_end()) == (
        RoleBegin("system"), "x", RoleEnd("system"),
    )  # fmt: skip
    assert leaves("") == ()


@pytest.mark.parametrize("value", [1, None, 2.5, ["a"], b"a"])
def test_other_types_are_named(value: object) -> None:
    with pytest.raises(TypeError, match=f"not of {type(value).__name__}"):
        leaves(value)


def test_parameters_go_by_the_names_of_generate() -> None:
    call = gapless.gen("x", max_tokens=3, min_tokens=1, stop=["\n"], temperature=0.0, top_k=None)
    assert call == Gen("x", {"max_new_tokens": 3, "min_new_tokens": 1, "stop": ["\n"], "temperature": 0.0})
    assert gapless.gen("x", 3) == gapless.gen("x", max_new_tokens=3)
    assert gapless.gen(json_schema={"type": "null"}) == Gen(None, {"json_schema": '{"type": "null"}'})


@pytest.mark.parametrize(
    ("kind", "matches", "others"),
    [
        (int, ["0", "-17", "120"], ["", "01", "1.0", "+1", "a"]),
        (float, ["0.5", "-12.25"], ["1", ".5", "1."]),
        (bool, ["True", "False"], ["true", ""]),
        (str, ['"a b"', '""'], ["a", '"a', '"a\n"', '"a"b"']),
    ],
)
def test_a_dtype_is_a_regex(kind: type, matches: list[str], others: list[str]) -> None:
    call = gapless.gen("x", dtype=kind)
    assert isinstance(call, Gen)
    assert call == gapless.gen("x", dtype=kind.__name__)
    pattern = re.compile(call.params["regex"])
    assert all(pattern.fullmatch(text) for text in matches)
    assert not any(pattern.fullmatch(text) for text in others)


def test_the_short_names_of_types() -> None:
    assert gapless.gen_int("x", 4, stop="\n") == gapless.gen("x", 4, dtype=int, stop="\n")
    assert gapless.gen_string("x") == gapless.gen("x", dtype="string")


def test_choices_make_a_select() -> None:
    chosen = gapless.gen("x", choices=["a", "b"], max_tokens=5, temperature=0.7)
    assert chosen == gapless.select("x", choices=["a", "b"])
    assert chosen == Select("x", ("a", "b"), "token_length_normalized")
    greedy = gapless.gen("x", choices=["a"], choices_method=gapless.greedy_token_selection)
    assert greedy == Select("x", ("a",), "greedy_token_selection")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: gapless.gen(max_tokens=1, max_new_tokens=2), "give max_new_tokens once"),
        (lambda: gapless.gen(heat=1), "'heat' is no sampling parameter; there are: .*temperature"),
        (lambda: gapless.gen(stop_regex="a"), "'stop_regex' is no sampling parameter"),
        (lambda: gapless.gen(dtype=list), "dtype must be int, float, bool or str, got <class 'list'>"),
        (lambda: gapless.gen(dtype=int, regex="a"), "give dtype or regex, not both"),
        (lambda: gapless.gen(choices_method="x"), "choices_method is for gen"),
        (lambda: gapless.gen(choices=[]), "choices must be a list of at least one string"),
        (lambda: gapless.select("x", choices="ab"), "choices must be a list .*got 'ab'"),
        (lambda: gapless.select("x"), "choices must be a list"),
        (lambda: gapless.select("x", ["a"], temperature=0.5), "does not sample"),
        (
            lambda: gapless.select("x", ["a"], choices_method="best"),
            "must be one of token_length.*got 'best'",
        ),
        (lambda: gapless.image("cat.png"), r"image\(\) is not supported"),
        (lambda: gapless.video("cat.mp4", 3), r"video\(\) is not supported"),
    ],
)
def test_what_is_wrong_is_named(make: object, message: str) -> None:
    assert callable(make)
    with pytest.raises((TypeError, ValueError, NotImplementedError), match=message):
        make()


def test_a_concatenation_is_flat() -> None:
    total = gapless.gen("a") + gapless.gen("b") + "c"
    assert isinstance(total, Concatenation)
    assert not any(isinstance(item, Concatenation) for item in total.items)
