"""--strict-fields, and that the structs in `api` say what the hand-written checks do."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from gapless.runtime.core import sampling
from gapless.runtime.core.config import ServerConfig
from gapless.runtime.core.errors import RequestError
from gapless.runtime.core.sampling import SamplingParams
from gapless.tokenizer_manager.api import GenerateBody, SamplingFields
from gapless.tokenizer_manager.schema import parse_fields

STRICT, LAX = ServerConfig(model_path="toy", strict_fields=True), ServerConfig(model_path="toy")


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"text": "a", "max_tokens": 5}, "max_tokens"),
        ({"text": "a", "log_metrics": None}, "log_metrics"),
        ({"text": "a", "sampling_params": {"max_tokens": 5}}, "sampling_params.max_tokens"),
        ({"text": ["a", "b"], "sampling_params": [{}, {"topp": 1}]}, "sampling_params[1].topp"),
    ],
)
def test_unknown_fields_are_named_when_asked_and_else_ignored(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(RequestError) as caught:
        parse_fields(fields, STRICT)
    assert caught.value.param == named
    assert named in caught.value.message
    assert parse_fields(fields, LAX).prompts


def test_every_known_field_passes_the_strict_check() -> None:
    fields = dict.fromkeys(GenerateBody.__struct_fields__) | {"text": "a", "return_logprob": False}
    fields["sampling_params"] = dict.fromkeys(SamplingFields.__struct_fields__)
    assert parse_fields(fields, STRICT).prompts[0].text == "a"


def test_the_other_routes_are_strict_as_well(run: Any, in_process: Any) -> None:
    async def test() -> None:
        for strict, status in ((True, 400), (False, 200)):
            async with in_process(strict_fields=strict) as service:
                for path, body in (
                    ("/tokenize", {"text": "a"}),
                    ("/detokenize", {"tokens": [1]}),
                    ("/abort_request", {"rid": "a"}),
                ):
                    response = await service.client.post(path, json=body | {"unheard of": None})
                    assert response.status_code == status
                    assert strict == ("unheard of" in response.text)

    run(test())


def test_the_description_has_the_names_and_defaults_of_the_parameters() -> None:
    served = set(SamplingParams.__struct_fields__)
    assert served <= set(SamplingFields.__struct_fields__) <= served | set(sampling._NOT_YET)
    described, default = SamplingFields(), SamplingParams()
    for name in served - {"stop", "stop_token_ids", "logit_bias"}:  # empty, and null, which means that
        assert getattr(described, name) == getattr(default, name), name


_EDGES: dict[str, tuple[list[Any], list[Any]]] = {  # inside and just outside
    "n": ([1, 16384], [0, 16385]),
    "max_new_tokens": ([0, 2**31 - 1], [-1, 2**31]),
    "temperature": ([0, 1e9], [-0.1]),
    "top_p": ([1e-9, 1], [0, 1.1]),
    "top_k": ([-1, 1], [-2]),
    "min_p": ([0, 1], [-0.1, 1.1]),
    "frequency_penalty": ([-2, 2], [-2.1, 2.1]),
    "presence_penalty": ([-2, 2], [-2.1, 2.1]),
    "repetition_penalty": ([0.1, 2], [0, 2.1]),
    "logit_bias": ([{"5": -100}, {"5": 100}, {}], [{"5": 101}, {"5": "1"}]),
    "stop": (["a", ["a"] * 32], [["a"] * 33, 5]),
    "stop_token_ids": ([5, [5] * 32], [[5] * 33, "5"]),
    "ignore_eos": ([True, False], [1, "true"]),
    "sampling_seed": ([-(2**63), 2**63 - 1], [2**63]),
}  # fmt: skip


@pytest.mark.parametrize("name", _EDGES)
def test_the_description_has_the_bounds_of_the_checks(name: str) -> None:
    inside, outside = _EDGES[name]
    for value in inside:
        msgspec.convert({name: value}, SamplingFields)
        SamplingParams.parse({name: value})
    for value in outside:
        with pytest.raises(msgspec.ValidationError):
            msgspec.convert({name: value}, SamplingFields)
        with pytest.raises(RequestError):
            SamplingParams.parse({name: value})
