"""Log probabilities through the real server and the offline engine, on the toy model."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from gapless import Engine

PROMPT = list(range(40))
GREEDY = {"max_new_tokens": 12, "ignore_eos": True, "temperature": 0}
ASK = {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 3, "token_ids_logprob": [5, 300]}
MODES = [(), ("--disable-overlap-schedule",), ("--num-scheduler-steps=4", "--chunked-prefill-size=16")]


def of(answer: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in answer["meta_info"].items() if "logprobs" in name}


def joined(events: list[dict[str, Any]]) -> dict[str, Any]:
    parts = [of(event) for event in events]
    return {name: [entry for part in parts for entry in part[name]] for name in parts[0]}


@pytest.mark.parametrize("options", MODES)
def test_a_stream_says_what_the_answer_says_and_so_does_a_second_request(serve, options) -> None:
    """A cache hit changes nothing, nor does a neighbour."""
    server = serve(*options)
    body = {"input_ids": PROMPT, "sampling_params": GREEDY, **ASK}
    noise = server.stream(text="neighbour", sampling_params=GREEDY | {"max_new_tokens": 300})
    first = server.generate(**body).json()
    second = server.generate(**body).json()
    assert of(first) == of(second)
    assert second["meta_info"]["cached_tokens"] == 0
    stream = server.stream(**body)
    stream.wait_end()
    assert of(stream.events[-1]) == of(first)
    for event in stream.events:
        entries = of(event)
        assert [entry[1] for entry in entries["output_token_logprobs"]] == event["output_ids"]
        assert len(entries["output_top_logprobs"]) == len(event["output_ids"])
    noise.wait_end()
    lists = of(first)
    assert [entry[1] for entry in lists["input_token_logprobs"]] == PROMPT
    assert lists["input_token_logprobs"][0][0] is None
    assert all(isinstance(entry[0], float) for entry in lists["input_token_logprobs"][1:])
    assert [len(row) for row in lists["output_top_logprobs"]] == [3] * 12
    assert all([entry[1] for entry in row] == [5, 300] for row in lists["output_token_ids_logprobs"])


def test_increments_make_up_the_whole(serve) -> None:
    server = serve("--incremental-streaming-output")
    body = {"input_ids": PROMPT, "sampling_params": GREEDY, **ASK}
    stream = server.stream(**body)
    stream.wait_end()
    assert joined(stream.events) == of(server.generate(**body).json())


def test_a_stop_string_cuts_them(serve, tmp_path) -> None:
    script = tmp_path / "ids"
    script.write_text(" ".join(str(i) for i in b"one two END and more. "))
    server = serve(f"--toy=script={script}")
    params = GREEDY | {"max_new_tokens": 60, "stop": ["END"]}
    for stream in (False, True):
        body = {
            "text": "ab",
            "sampling_params": params,
            "return_logprob": True,
            "return_text_in_logprobs": True,
        }
        if stream:
            events = server.stream(**body)
            events.wait_end()
            answer = events.events[-1]
        else:
            answer = server.generate(**body).json()
        assert answer["text"] == "one two "
        texts = [entry[2] for entry in answer["meta_info"]["output_token_logprobs"]]
        assert "".join(texts) == "one two END"
        assert len(texts) == len(answer["output_ids"]) == answer["meta_info"]["completion_tokens"]


def test_each_prompt_of_a_batch_and_each_sample_has_its_own(serve) -> None:
    server = serve()
    batch = server.generate(
        text=["abc", "defgh"],
        sampling_params=[GREEDY, GREEDY | {"n": 2}],
        return_logprob=[False, True],
        logprob_start_len=[-1, 2],
    ).json()
    alone = server.generate(
        text="defgh", sampling_params=GREEDY, return_logprob=True, logprob_start_len=2
    ).json()
    assert [of(answer) for answer in batch] == [{}, of(alone), of(alone)]
    assert [entry[1] for entry in of(alone)["input_token_logprobs"]] == list(b"fgh")


def test_a_prompt_is_scored_without_output(serve) -> None:
    """As the DSL's select asks: the first is a number, since something comes before it."""
    server = serve()
    body = {"text": "hello", "sampling_params": {"max_new_tokens": 0}, "return_logprob": True}
    answer = server.generate(**body, logprob_start_len=3).json()
    assert answer["text"] == ""
    lists = of(answer)
    assert lists["output_token_logprobs"] == []
    assert [entry[1] for entry in lists["input_token_logprobs"]] == list(b"lo")
    assert isinstance(lists["input_token_logprobs"][0][0], float)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"token_ids_logprob": [999_999]}, "token_ids_logprob"),
        ({"token_ids_logprob": [-1]}, "token_ids_logprob[0]"),
        ({"top_logprobs_num": -1}, "top_logprobs_num"),
        ({"top_logprobs_num": 512, "input_ids": [1] * 3000, "text": None}, "top_logprobs_num"),
        ({"logprob_start_len": 2}, "logprob_start_len"),
    ],
)
def test_a_bad_field_is_a_400_and_a_neighbour_goes_on(serve, fields, param) -> None:
    server = serve()
    neighbour = server.stream(text="n", sampling_params=GREEDY | {"max_new_tokens": 100}, return_logprob=True)
    response = httpx.post(
        f"{server.url}/generate",
        content=json.dumps({"text": "ab", "return_logprob": True} | fields),
        timeout=60,
    )
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param
    neighbour.wait_end()
    assert neighbour.done
    assert len(of(neighbour.events[-1])["output_token_logprobs"]) == 100


def test_the_offline_engine_says_the_same(serve) -> None:
    server = serve()
    want = server.generate(input_ids=PROMPT, sampling_params=GREEDY, **ASK).json()
    with Engine("toy") as engine:
        got = engine.generate(input_ids=PROMPT, sampling_params=GREEDY, **ASK)
        assert json.loads(json.dumps(of(got))) == of(want)
        chunks = list(engine.generate(input_ids=PROMPT, sampling_params=GREEDY, stream=True, **ASK))
        assert json.loads(json.dumps(of(chunks[-1]))) == of(want)
        assert all(len(of(c)["output_token_logprobs"]) == len(c["output_ids"]) for c in chunks)
