"""Every wrong value of /generate gets an error that names its field."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from gapless.runtime.core.config import ServerConfig
from gapless.runtime.core.errors import RequestError
from gapless.tokenizer_manager.schema import GenerateRequest, parse_fields, parse_generate

CONFIG = ServerConfig(model_path="toy", max_batch_requests=8)


def parse(**fields: Any) -> GenerateRequest:
    return parse_generate(msgspec.json.encode(fields), CONFIG)


def refused(body: bytes) -> RequestError:
    with pytest.raises(RequestError) as caught:
        parse_generate(body, CONFIG)
    return caught.value


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "text"),
        ({"text": None}, "text"),
        ({"text": 5}, "text"),
        ({"text": []}, "text"),
        ({"text": ["a", 5]}, "text[1]"),
        ({"text": ["a", ["b"]]}, "text[1]"),
        ({"text": "a", "input_ids": [1]}, "input_ids"),
        ({"input_ids": 5}, "input_ids"),
        ({"input_ids": "12"}, "input_ids"),
        ({"input_ids": []}, "input_ids"),
        ({"input_ids": [[1], 2]}, "input_ids[1]"),
        ({"input_ids": [[1], []]}, "input_ids[1]"),
        ({"text": ["a"] * 9}, "text"),
        ({"text": "a", "stream": 1}, "stream"),
        ({"text": "a", "stream": "true"}, "stream"),
        ({"text": "a", "rid": 5}, "rid"),
        ({"text": "a", "rid": ""}, "rid"),
        ({"text": "a", "rid": "r" * 257}, "rid"),
        ({"text": "a", "rid": ["r"]}, "rid"),
        ({"text": ["a", "b"], "rid": ["r"]}, "rid"),
        ({"text": ["a", "b"], "rid": ["r", None]}, "rid[1]"),
        ({"text": "a", "extra_key": 5}, "extra_key"),
        ({"text": ["a", "b"], "extra_key": ["k", 5]}, "extra_key[1]"),
        ({"text": "a", "sampling_params": 5}, "sampling_params"),
        ({"text": "a", "sampling_params": [{}]}, "sampling_params"),
        ({"text": ["a", "b"], "sampling_params": [{}]}, "sampling_params"),
        ({"text": ["a", "b"], "sampling_params": [{}, 5]}, "sampling_params[1]"),
        ({"text": ["a", "b"], "sampling_params": [{}, {"top_p": 2}]}, "sampling_params[1].top_p"),
        ({"text": "a", "sampling_params": {"temperature": -1}}, "sampling_params.temperature"),
        ({"text": "a", "return_logprob": 1}, "return_logprob"),
        ({"text": ["a", "b"], "return_logprob": [True]}, "return_logprob"),
        *(({"text": "a", "logprob_start_len": v}, "logprob_start_len") for v in (-2, 2**31, 0.0, True, [0])),
        *(
            ({"text": "a", "top_logprobs_num": v}, "top_logprobs_num")
            for v in (-1, 129, 10**30, 1.0, True, [1])
        ),
        ({"text": ["a", "b"], "top_logprobs_num": [1, 129]}, "top_logprobs_num[1]"),
        *(({"text": "a", "token_ids_logprob": v}, "token_ids_logprob") for v in (5, {}, [1] * 129)),
        *(
            ({"text": "a", "token_ids_logprob": [5, v]}, "token_ids_logprob[1]")
            for v in (-1, "1", 2**31, [1])
        ),
        ({"text": ["a", "b"], "token_ids_logprob": [[1], 5]}, "token_ids_logprob[1]"),
        ({"text": ["a", "b"], "token_ids_logprob": [[1], [1, -1]]}, "token_ids_logprob[1][1]"),
        ({"text": "a", "return_text_in_logprobs": [True]}, "return_text_in_logprobs"),
        ({"text": "a", "image_data": "x"}, "image_data"),
        ({"text": "a", "lora_path": "x"}, "lora_path"),
        ({"text": "a", "return_hidden_states": True}, "return_hidden_states"),
        ({"text": ["a", "b"], "extra_key": ["k"]}, "extra_key"),
        ({"text": "a", "extra_key": ["k"]}, "extra_key"),
        ({"text": "a", "cache_salt": 5}, "cache_salt"),
        ({"text": "a", "cache_salt": "s" * 257}, "cache_salt"),
        ({"text": ["a", "b"], "cache_salt": ["s", {}]}, "cache_salt[1]"),
        *(({"text": "a", "priority": v}, "priority") for v in (2**31, -(2**31) - 1, 1.0, "1", True, [1])),
        ({"text": ["a", "b"], "priority": [1]}, "priority"),
        ({"text": ["a", "b"], "priority": [1, "2"]}, "priority[1]"),
        *(
            ({"text": "a", "sampling_params": {"n": n}}, "sampling_params.n")
            for n in (0, -1, 1.0, "2", True, 9, 10**9, 2**63 - 1, 10**30)
        ),
        ({"text": ["a"] * 3, "sampling_params": {"n": 3}}, "sampling_params.n"),
        ({"text": ["a", "b"], "sampling_params": [{"n": 7}, {"n": 2}]}, "sampling_params[0].n"),
        ({"text": ["a", "b"], "sampling_params": [{"n": 1}, {"n": 0}]}, "sampling_params[1].n"),
        ({"text": "a", "bootstrap_room": 2**62}, "bootstrap_room"),
    ],
)
def test_a_wrong_field_is_named(fields: dict[str, Any], param: str) -> None:
    assert refused(msgspec.json.encode(fields)).param == param


@pytest.mark.parametrize(
    "body",
    [
        b"", b"{", b"[]", b"null", b'"text"', b"\xff", b"[" * 100_000, b'{"text":"\xff"}', b'{"text":"\\ud800"}',
        b'{"text":"a"} x', b'{"text":"a","sampling_params":{"temperature":NaN}}',
        b'{"text":"a","sampling_params":{"temperature":Infinity}}',
        b'{"text":"a","sampling_params":{"temperature":1e400}}',
        b'{"text":"a","sampling_params":{"top_k":' + b"1" * 5000 + b"}}",
    ],
)  # fmt: skip
def test_what_is_not_a_json_object_is_refused(body: bytes) -> None:
    assert refused(body).status == 400


def test_null_is_the_default_and_unknown_fields_are_ignored() -> None:
    """Routers fill a body with nulls and with fields of their own."""
    nulls = dict.fromkeys(
        (
            "input_ids",
            "sampling_params",
            "rid",
            "stream",
            "extra_key",
            "image_data",
            "cache_salt",
            "priority",
            "return_bytes",
        )
    )
    request = parse(text="a", log_metrics=True, background=False, return_logprob=False, **nulls)
    (prompt,) = request.prompts
    assert (request.is_list, request.stream, prompt.text, prompt.params.n) == (False, False, "a", 1)
    assert (prompt.extra_key, prompt.cache_salt, prompt.priority) == ("", "", 0)
    assert prompt.params.max_new_tokens == 128
    assert len(prompt.rid) == 32


def test_a_batch_shares_or_lists_its_fields() -> None:
    request = parse(
        input_ids=[[1], [2]], rid="x", sampling_params=[{"top_k": 3}, None], extra_key="tenant", stream=True
    )
    assert request.is_list
    assert request.stream
    assert [(p.input_ids, *p.rids, p.params.top_k, p.extra_key, p.field) for p in request.prompts] == [
        ([1], "x_0", 3, "tenant", "input_ids[0]"),
        ([2], "x_1", -1, "tenant", "input_ids[1]"),
    ]
    listed = parse(text=["a", "b"], rid=["x", "y"], sampling_params={"top_k": 5}, extra_key=["k", None])
    assert [(*p.rids, p.params.top_k, p.extra_key, p.params_field) for p in listed.prompts] == [
        ("x", 5, "k", "sampling_params"),
        ("y", 5, "", "sampling_params"),
    ]


def test_salts_and_priorities_are_shared_or_listed() -> None:
    request = parse(text=["a", "b"], cache_salt="s", priority=-(2**31))
    assert [(p.cache_salt, p.priority) for p in request.prompts] == [("s", -(2**31))] * 2
    request = parse(text=["a", "b", "c"], cache_salt=["s", None, ""], priority=[2**31 - 1, None, -3])
    assert [(p.cache_salt, p.priority) for p in request.prompts] == [("s", 2**31 - 1), ("", 0), ("", -3)]


@pytest.mark.parametrize(
    ("fields", "is_list", "rids"),
    [
        ({"text": "a", "rid": "x", "sampling_params": {"n": 1}}, False, {"x": ["x"]}),
        ({"text": "a", "rid": "x", "sampling_params": {"n": 3}}, True, {"x": ["x_0", "x_1", "x_2"]}),
        ({"text": ["a"], "rid": "x", "sampling_params": {"n": 2}}, True, {"x": ["x_0", "x_1"]}),
        (
            {"text": ["a", "b"], "rid": "x", "sampling_params": {"n": 2}},
            True,
            {"x": ["x_0", "x_1", "x_2", "x_3"]},
        ),
        (
            {"text": ["a", "b"], "rid": ["x", "y"], "sampling_params": [{"n": 1}, {"n": 2}]},
            True,
            {"x": ["x"], "y": ["y_0", "y_1"]},
        ),
    ],
)
def test_samples_are_numbered_under_the_request_id_that_was_given(
    fields: dict[str, Any], is_list: bool, rids: dict[str, list[str]]
) -> None:
    request = parse(**fields)
    assert request.is_list is is_list
    got: dict[str, list[str]] = {}
    for prompt in request.prompts:
        assert len(prompt.rids) == prompt.params.n
        got.setdefault(prompt.rid, []).extend(prompt.rids)
    assert got == rids


def test_as_many_samples_as_a_request_may_ask_for() -> None:
    assert len(parse(text="a", sampling_params={"n": 8}).prompts[0].rids) == 8
    assert sum(len(p.rids) for p in parse(text=["a"] * 4, sampling_params={"n": 2}).prompts) == 8


@pytest.mark.parametrize("field", ["rid", "extra_key", "cache_salt"])
def test_a_lone_surrogate_of_a_caller_in_python_is_refused(field: str) -> None:
    with pytest.raises(RequestError) as caught:
        parse_fields({"text": "a", field: "x\ud800"}, CONFIG)
    assert caught.value.param == field


def test_any_json_may_stand_where_nothing_is_served() -> None:
    """Also a list nested as deep as the decoder takes it: a refusal that names the field, no recursion."""
    nested = 900 * "[" + 900 * "]"
    with pytest.raises(RequestError) as caught:
        parse_generate(b'{"text": "a", "image_data": %s}' % nested.encode(), CONFIG)
    assert caught.value.param == "image_data"


def test_a_batch_of_one_stays_a_batch() -> None:
    assert parse(text=["a"]).is_list
    assert parse(input_ids=[[1]]).is_list
    assert not parse(input_ids=[1]).is_list
