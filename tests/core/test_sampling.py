"""Sampling parameters: defaults, ranges, and an error that names the field."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gapless.runtime.core.errors import RequestError
from gapless.runtime.core.sampling import (
    MAX_BIASES,
    MAX_GRAMMAR_CHARS,
    MAX_SAMPLES,
    MAX_STOP_CHARS,
    MAX_STOPS,
    SamplingParams,
)

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)
FIELDS = list(SamplingParams.__struct_fields__)


def test_defaults_are_sglangs() -> None:
    params = SamplingParams.parse({})
    assert (params.max_new_tokens, params.temperature, params.top_p, params.top_k) == (128, 1.0, 1.0, -1)
    assert SamplingParams.parse(dict.fromkeys(FIELDS)) == params
    assert SamplingParams.parse({"no_such_field": 1}) == params


@pytest.mark.parametrize(
    ("name", "value", "want"),
    [
        ("n", 1, 1),
        ("n", MAX_SAMPLES, MAX_SAMPLES),
        ("max_new_tokens", 0, 0),
        ("temperature", 0, 0.0),
        ("temperature", 1e308, 1e308),
        ("top_p", 1, 1.0),
        ("top_k", -1, -1),
        ("top_k", 1, 1),
        ("min_p", 1, 1.0),
        ("min_new_tokens", 128, 128),
        *((name, v, float(v)) for name in ("frequency_penalty", "presence_penalty") for v in (-2, 0, 2)),
        ("repetition_penalty", 2, 2.0),
        ("repetition_penalty", 5e-324, 5e-324),
        ("logit_bias", {}, {}),
        ("logit_bias", {"0": -100, 5: 100, "2147483647": 0.5}, {0: -100.0, 5: 100.0, 2147483647: 0.5}),
        ("logit_bias", dict.fromkeys(range(MAX_BIASES), 1.0), dict.fromkeys(range(MAX_BIASES), 1.0)),
        ("stop", "END", ("END",)),
        ("stop", [], ()),
        ("stop", ["x"] * MAX_STOPS, ("x",) * MAX_STOPS),
        ("stop", "x" * MAX_STOP_CHARS, ("x" * MAX_STOP_CHARS,)),
        ("stop_token_ids", 5, (5,)),
        ("stop_token_ids", [5, 6], (5, 6)),
        ("sampling_seed", -(2**63), -(2**63)),
        ("ignore_eos", True, True),
    ],
)
def test_values_that_are_taken(name: str, value: Any, want: Any) -> None:
    got = getattr(SamplingParams.parse({name: value}), name)
    assert (got, type(got)) == (want, type(want))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("n", v) for v in (0, -1, MAX_SAMPLES + 1, 10**9, 2**63 - 1, 1.0, "2", True, [1])),
        *(("max_new_tokens", v) for v in (-1, "5", 2**63, 1.0, True)),
        *(("temperature", v) for v in (-1, math.nan, math.inf, "nan", True, 10**400, -1e-9)),
        *(("top_p", v) for v in (0, 1.1, -0.5, math.nan, "1", [0.5])),
        *(("top_k", v) for v in (0, -2, 1.5, True, 2**31)),
        *(("min_p", v) for v in (-0.1, 1.1, math.nan, False)),
        *(("min_new_tokens", v) for v in (-1, 129, "5", 2**63, 1.0, True)),
        *(
            (name, v)
            for name in ("frequency_penalty", "presence_penalty")
            for v in (-2.001, 2.001, math.nan, math.inf, "1", True, [0])
        ),
        *(("repetition_penalty", v) for v in (0, -0.0, -1, 2.001, math.nan, math.inf, "1", True, {})),
        *(("logit_bias", v) for v in (5, "5", [[5, 1]], True, dict.fromkeys(range(MAX_BIASES + 1), 1))),
        *(
            ("logit_bias", {key: 1})
            for key in ("", "x", "05", "+5", "-1", " 5", "5.0", "\u0665", "²", "1" * 5000, None, True, 5.0)
        ),
        *(("logit_bias", {key: 1}) for key in (-1, 2**31)),
        *(("logit_bias", {"5": v}) for v in (-100.5, 101, math.nan, math.inf, 10**400, "1", True, None, [])),
        ("logit_bias", {"5": 1, 5: 1}),
        *(("sampling_seed", v) for v in (2**63, 1.5, "1", True)),
        *(("stop", v) for v in (5, [5], "", ["a", ""], {"a": 1}, ["x"] * (MAX_STOPS + 1))),
        *(("stop", v) for v in ("x" * (MAX_STOP_CHARS + 1), ["x" * 513] * 2, ["x"] * 1_000_000)),
        ("stop", ["a", "\ud83d"]),
        *(("stop_token_ids", v) for v in ("5", [1.5], [True], [[5]], [5] * (MAX_STOPS + 1))),
        *(
            (name, v)
            for name in ("ignore_eos", "skip_special_tokens", "no_stop_trim")
            for v in (1, "true", [])
        ),
    ],
    ids=lambda value: repr(value)[:20],
)
def test_values_that_are_refused(name: str, value: Any) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams.parse({name: value}, "sampling_params[3]")
    assert caught.value.param == f"sampling_params[3].{name}"
    assert name in caught.value.message
    assert len(caught.value.message) < 200


def test_min_new_tokens_is_at_most_max_new_tokens() -> None:
    assert SamplingParams.parse({"min_new_tokens": 300, "max_new_tokens": 300}).min_new_tokens == 300
    with pytest.raises(RequestError, match="at most max_new_tokens, which is 3, got 4") as caught:
        SamplingParams.parse({"min_new_tokens": 4, "max_new_tokens": 3})
    assert caught.value.param == "sampling_params.min_new_tokens"


@pytest.mark.parametrize(
    ("fields", "adjusts"),
    [
        ({"temperature": 0.3, "top_p": 0.5, "top_k": 3, "min_p": 0.1, "stop": "x"}, False),
        ({"min_new_tokens": 0, "frequency_penalty": 0, "presence_penalty": -0.0}, False),
        ({"repetition_penalty": 1, "logit_bias": {}}, False),
        ({"min_new_tokens": 1}, True),
        ({"frequency_penalty": -0.1}, True),
        ({"presence_penalty": 0.1}, True),
        ({"repetition_penalty": 0.9}, True),
        ({"logit_bias": {"5": 0}}, True),
    ],
)
def test_which_requests_adjust_their_logits(fields: dict[str, Any], adjusts: bool) -> None:
    assert SamplingParams.parse(fields).adjusts_logits is adjusts


def test_what_is_not_served_is_refused_unless_it_asks_for_nothing() -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams.parse({"structural_tag": "{}"})
    assert caught.value.param == "sampling_params.structural_tag"
    assert SamplingParams.parse({"structural_tag": None}) == SamplingParams()


@pytest.mark.parametrize(
    ("fields", "grammar"),
    [
        ({}, None),
        ({"regex": None, "json_schema": None, "ebnf": "root ::= x"}, ("ebnf", "root ::= x")),
        ({"regex": ""}, ("regex", "")),
        ({"regex": "(" * 100 + "\\(" * 100 + ")" * 100}, ("regex", "(" * 100 + "\\(" * 100 + ")" * 100)),
        (
            {"json_schema": {"b": 1, "a": "é" + "[" * 200}},
            ("json_schema", '{"b":1,"a":"é' + "[" * 200 + '"}'),
        ),
        ({"json_schema": '{"a": "\\"[[["}'}, ("json_schema", '{"a": "\\"[[["}')),
        ({"json_schema": "x" * MAX_GRAMMAR_CHARS}, ("json_schema", "x" * MAX_GRAMMAR_CHARS)),
    ],
)
def test_what_the_output_must_match_is_kept_as_text(
    fields: dict[str, Any], grammar: tuple[str, str] | None
) -> None:
    assert SamplingParams.parse(fields).grammar == grammar


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"regex": 3}, "regex"),
        ({"regex": {"a": 1}}, "regex"),
        ({"regex": "\ud800"}, "regex"),
        ({"ebnf": ["root"]}, "ebnf"),
        ({"json_schema": [1]}, "json_schema"),
        ({"json_schema": True}, "json_schema"),
        ({"json_schema": {"a": object()}}, "json_schema"),
        ({"json_schema": "x" * (MAX_GRAMMAR_CHARS + 1)}, "json_schema"),
        ({"json_schema": '{"a":' * 101 + "1" + "}" * 101}, "json_schema"),
        ({"regex": "(" * 101 + "a" + ")" * 101}, "regex"),
        ({"ebnf": 'root ::= "' + "(" * 101 + '"'}, "ebnf"),
        ({"regex": "a", "ebnf": "root ::= a"}, "ebnf"),
        ({"regex": "a", "json_schema": "{}"}, "regex"),
    ],
)
def test_a_grammar_is_one_text_of_bounded_size_and_depth(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams.parse(fields)
    assert caught.value.param == f"sampling_params.{field}"


@given(st.dictionaries(st.sampled_from(FIELDS), JSON))
def test_any_json_is_parsed_or_refused(fields: dict[str, Any]) -> None:
    try:
        params = SamplingParams.parse(fields)
    except RequestError as error:
        assert error.param is not None
        assert error.param.removeprefix("sampling_params.") in fields
        return
    assert 1 <= params.n <= MAX_SAMPLES
    assert params.max_new_tokens >= 0
    assert 0 <= params.temperature < math.inf
    assert 0 < params.top_p <= 1
    assert params.top_k == -1 or params.top_k >= 1
    assert 0 <= params.min_p <= 1
    assert 0 <= params.min_new_tokens <= params.max_new_tokens
    assert -2 <= params.frequency_penalty <= 2
    assert -2 <= params.presence_penalty <= 2
    assert 0 < params.repetition_penalty <= 2
    assert all(-100 <= bias <= 100 for bias in params.logit_bias.values())
    assert SamplingParams.parse({name: getattr(params, name) for name in FIELDS}) == params


def test_a_deep_value_is_refused_too() -> None:
    value: Any = []
    for _ in range(100_000):
        value = [value]
    with pytest.raises(RequestError):
        SamplingParams.parse({"temperature": value})


@pytest.mark.parametrize(
    ("fields", "greedy"),
    [
        ({"temperature": 0}, True),
        ({"temperature": 9e-7}, True),
        ({"temperature": 1e-6}, False),
        ({"top_k": 1}, True),
    ],
)
def test_greedy(fields: dict[str, Any], greedy: bool) -> None:
    assert SamplingParams.parse(fields).greedy is greedy
