"""Sampling parameters: defaults, ranges, and an error that names the field."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gapless.runtime.core.errors import RequestError
from gapless.runtime.core.sampling import MAX_STOP_CHARS, MAX_STOPS, SamplingParams

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
        ("max_new_tokens", 0, 0),
        ("temperature", 0, 0.0),
        ("temperature", 1e308, 1e308),
        ("top_p", 1, 1.0),
        ("top_k", -1, -1),
        ("top_k", 1, 1),
        ("min_p", 1, 1.0),
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
        *(("max_new_tokens", v) for v in (-1, "5", 2**63, 1.0, True)),
        *(("temperature", v) for v in (-1, math.nan, math.inf, "nan", True, 10**400, -1e-9)),
        *(("top_p", v) for v in (0, 1.1, -0.5, math.nan, "1", [0.5])),
        *(("top_k", v) for v in (0, -2, 1.5, True, 2**31)),
        *(("min_p", v) for v in (-0.1, 1.1, math.nan, False)),
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


@pytest.mark.parametrize(
    ("name", "value", "neutral"),
    [
        ("n", 2, 1),
        ("n", True, 1),
        ("n", 10**9, 1),
        ("min_new_tokens", 1, 0),
        ("frequency_penalty", 0.5, 0.0),
        ("presence_penalty", math.nan, 0),
        ("repetition_penalty", 1.1, 1.0),
        ("logit_bias", {"5": 1}, {}),
        ("regex", "[", None),
        ("json_schema", "{}", None),
    ],
)
def test_what_is_not_served_is_refused_unless_it_asks_for_nothing(
    name: str, value: Any, neutral: Any
) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams.parse({name: value})
    assert caught.value.param == f"sampling_params.{name}"
    assert SamplingParams.parse({name: neutral}) == SamplingParams()


@given(st.dictionaries(st.sampled_from(FIELDS), JSON))
def test_any_json_is_parsed_or_refused(fields: dict[str, Any]) -> None:
    try:
        params = SamplingParams.parse(fields)
    except RequestError as error:
        assert error.param is not None
        assert error.param.removeprefix("sampling_params.") in fields
        return
    assert params.max_new_tokens >= 0
    assert 0 <= params.temperature < math.inf
    assert 0 < params.top_p <= 1
    assert params.top_k == -1 or params.top_k >= 1
    assert 0 <= params.min_p <= 1
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
