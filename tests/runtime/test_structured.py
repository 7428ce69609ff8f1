"""Structured output through the whole server: what comes matches, what is bad is refused, and nobody else notices."""

from __future__ import annotations

import asyncio
import json
import re
import signal
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import jsonschema
import pytest

from gapless import Engine
from gapless.runtime.core.errors import RequestError, UnavailableError
from gapless.runtime.model.toy import ToyKnobs, toy_output

POINT = {
    "type": "object",
    "properties": {"x": {"type": "integer", "minimum": 0, "maximum": 9}, "on": {"type": "boolean"}},
    "required": ["x", "on"],
    "additionalProperties": False,
}
GBNF = 'root ::= "(" root ")" | "yes" | "no"'
WIDE = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(2000)}}
LONG = {"max_new_tokens": 400, "ignore_eos": True}


def free(text: str, count: int) -> list[int]:
    return toy_output(ToyKnobs(), list(text.encode()), count)


def texts(response: httpx.Response) -> list[str]:
    assert response.status_code == 200, response.text
    answers = response.json()
    answers = answers if isinstance(answers, list) else [answers]
    assert {answer["meta_info"]["finish_reason"]["type"] for answer in answers} == {"stop"}
    return [answer["text"] for answer in answers]


@pytest.mark.parametrize("options", [(), ("--disable-overlap-schedule",), ("--num-scheduler-steps=4",)])
def test_each_kind_of_grammar_holds_beside_free_neighbours(serve: Any, options: tuple[str, ...]) -> None:
    server = serve(*options)
    params: list[dict[str, Any]] = [
        {"regex": "(ab|cd){1,9}e"},
        {"json_schema": POINT},
        {"json_schema": json.dumps(POINT)},
        {"ebnf": GBNF},
        {"ebnf": 'start: "a" b\nb: /[0-9]{2,5}/'},
        {"regex": "[0-9]{3}", "ignore_eos": True},
        {"regex": "[0-9]{3}", "min_new_tokens": 50, "stop": ["no such"]},
    ]
    params = [item | {"max_new_tokens": 200} for item in params]
    neighbours = [server.stream(text=text, sampling_params=LONG) for text in "abc"]
    for stream in neighbours:
        stream.wait_first()
    out = texts(server.generate(text=["x"] * len(params), sampling_params=params))
    assert re.fullmatch("(ab|cd){1,9}e", out[0])
    for text in out[1:3]:
        jsonschema.validate(json.loads(text), POINT)
    assert out[1] == out[2]
    assert re.fullmatch(r"(\(*)(yes|no)(\)*)", out[3]) and out[3].count("(") == out[3].count(")")
    assert re.fullmatch("a[0-9]{2,5}", out[4])
    assert re.fullmatch("[0-9]{3}", out[5])
    assert re.fullmatch("[0-9]{3}", out[6])
    assert len(set(texts(server.generate(text="x", sampling_params=params[0] | {"n": 3})))) == 1
    for text, stream in zip("abc", neighbours, strict=True):
        stream.wait_end()
        assert stream.events[-1]["output_ids"] == free(text, 400)


def test_a_stream_shows_what_came_in_one_piece(serve: Any) -> None:
    server = serve()
    params = {"json_schema": POINT, "max_new_tokens": 200}
    (whole,) = texts(server.generate(text="x", sampling_params=params))
    stream = server.stream(text="x", sampling_params=params)
    stream.wait_end()
    assert stream.done
    assert stream.events[-1]["text"] == whole
    assert stream.events[-1]["meta_info"]["finish_reason"] == {"type": "stop", "matched": None}


BAD = [
    ({"regex": "["}, "regex"),
    ({"json_schema": "{"}, "json_schema"),
    ({"json_schema": {"$ref": "#"}}, "json_schema"),
    ({"json_schema": {"$ref": "#/$defs/missing"}}, "json_schema"),
    ({"ebnf": "root ::= missing"}, "ebnf"),
    ({"regex": "a", "json_schema": "{}"}, "regex"),
    ({"json_schema": '{"items":' * 2000 + "{}" + "}" * 2000}, "json_schema"),
    ({"regex": "(" * 2000 + "a" + ")" * 2000}, "regex"),
    ({"regex": "a" * 200_000}, "regex"),
]


@pytest.mark.parametrize("no_overlap", [False, True])
def test_bad_grammars_and_bombs_harm_nobody(serve: Any, no_overlap: bool) -> None:
    """Each gets a 400 that names it, or an output that matches, while others stream on."""
    server = serve(*["--disable-overlap-schedule"] * no_overlap)
    stream = server.stream(text="a", sampling_params=LONG)
    stream.wait_first()
    for stream_too in (False, True):
        for params, field in BAD:
            response = server.generate(text="x", sampling_params=params, stream=stream_too)
            assert response.status_code == 400, params
            assert response.json()["error"]["param"] == f"sampling_params.{field}"
    bombs: list[dict[str, Any]] = [
        {"regex": "(a{1,500}){1,500}"},
        {"json_schema": {"type": "array", "items": {"const": 1}, "maxItems": 10**18}},
    ]
    for params in bombs:
        answer = server.generate(text="x", sampling_params=params | {"max_new_tokens": 20}).json()
        assert re.fullmatch(r"a+|\[.*", answer["text"])
    stream.wait_end()
    assert stream.events[-1]["output_ids"] == free("a", 400)


def test_a_grammar_that_takes_too_long_is_refused_while_others_stream(
    serve: Any, watch: Any, children_of: Any
) -> None:
    """The process that checks is stopped, as if it computed without end; the next grammar gets a new one."""
    server = serve("--grammar-timeout=1", "--toy=delay_ms=5")
    assert texts(server.generate(text="x", sampling_params={"regex": "ab"})) == ["ab"]
    http = server.children()["tokenizer_manager"]
    (checker,) = [watch(pid) for pid in children_of(http.pid)]
    checker.send(signal.SIGSTOP)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(server.generate, text="x", sampling_params={"regex": "cd"})
        other = server.stream(text="a", sampling_params={"max_new_tokens": 30, "ignore_eos": True})
        other.wait_end()
        assert other.events[-1]["output_ids"] == free("a", 30)
        response = waiting.result()
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "sampling_params.regex"
    assert "1 s (--grammar-timeout)" in response.json()["error"]["message"]
    assert checker.within(5)
    assert texts(server.generate(text="x", sampling_params={"regex": "ef"})) == ["ef"]


def test_a_schema_too_slow_for_the_deadline_is_refused(serve: Any) -> None:
    server = serve("--grammar-timeout=0.1")
    response = server.generate(text="x", sampling_params={"json_schema": WIDE})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "sampling_params.json_schema"
    assert texts(server.generate(text="x", sampling_params={"regex": "ef"})) == ["ef"]


def test_the_checker_dies_with_the_server(serve: Any, watch: Any, children_of: Any) -> None:
    server = serve()
    server.generate(text="x", sampling_params={"regex": "ab"})
    http = server.children()["tokenizer_manager"]
    (checker,) = [watch(pid) for pid in children_of(http.pid)]
    assert server.stop() == 0
    assert checker.within(5)


def test_without_a_backend_such_requests_are_refused(serve: Any) -> None:
    server = serve("--grammar-backend=none")
    assert server.generate(text="x", sampling_params={"regex": "a"}).status_code == 400
    assert server.generate(text="x").status_code == 200


def test_the_offline_engine_checks_and_constrains_too() -> None:
    with Engine("toy") as engine:
        answer = engine.generate("x", {"json_schema": POINT, "max_new_tokens": 200})
        jsonschema.validate(json.loads(answer["text"]), POINT)
        with pytest.raises(RequestError) as caught:
            engine.generate(["x", "y"], [{}, {"regex": "["}])
        assert caught.value.param == "sampling_params[1].regex"

        async def many() -> list[Any]:
            return await asyncio.gather(
                *(engine.async_generate("x", {"ebnf": GBNF, "max_new_tokens": 99}) for _ in range(8))
            )

        assert len({answer["text"] for answer in asyncio.run(many())}) == 1
    with pytest.raises(UnavailableError):
        engine.generate("x", {"regex": "a"})
