"""Several samples of one prompt through the real server and the offline engine, on the toy model."""

import asyncio
from typing import Any

import httpx
import pytest

from gapless import Engine
from gapless.runtime.core.errors import RequestError
from gapless.runtime.model.toy import ToyKnobs, toy_output

PARAMS = {"max_new_tokens": 8, "ignore_eos": True, "temperature": 0}
LONG = {"max_new_tokens": 1500, "ignore_eos": True}


def expected(text: str, count: int = 8) -> list[int]:
    return toy_output(ToyKnobs(), list(text.encode()), count)


def ids_of(answers: list[dict[str, Any]]) -> list[list[int]]:
    return [answer["output_ids"] for answer in answers]


@pytest.mark.parametrize("options", [(), ("--disable-overlap-schedule",), ("--num-scheduler-steps=4",)])
def test_shapes_and_ids(serve, options: tuple[str, ...]) -> None:
    """The toy model is greedy whatever the temperature: each sample is the closed form of its prompt."""
    server = serve(*options)
    one = server.generate(text="hello", sampling_params=PARAMS | {"n": 1}).json()
    assert one["output_ids"] == expected("hello")
    for params in (PARAMS, PARAMS | {"temperature": 1.0, "sampling_seed": 7}):
        three = server.generate(text="hello", rid="x", sampling_params=params | {"n": 3}).json()
        assert ids_of(three) == [expected("hello")] * 3
        assert [a["meta_info"]["id"] for a in three] == ["x_0", "x_1", "x_2"]
        assert [a["meta_info"]["prompt_tokens"] for a in three] == [5] * 3
    four = server.generate(text=["ab" * 40, "c"], sampling_params=PARAMS | {"n": 2}).json()
    assert ids_of(four) == [expected("ab" * 40)] * 2 + [expected("c")] * 2
    nothing = server.generate(text="hello", sampling_params={"max_new_tokens": 0, "n": 2}).json()
    assert [a["text"] for a in nothing] == ["", ""]


def test_a_stream_gives_each_sample_under_its_index(serve) -> None:
    server = serve("--incremental-streaming-output")
    stream = server.stream(text=["ab" * 20, "c"], sampling_params=PARAMS | {"n": 2})
    stream.wait_end()
    assert stream.done
    got: dict[int, list[int]] = {}
    for event in stream.events:
        got.setdefault(event["index"], []).extend(event["output_ids"])
    assert got == {0: expected("ab" * 20), 1: expected("ab" * 20), 2: expected("c"), 3: expected("c")}


@pytest.mark.parametrize("overlap", [(), ("--disable-overlap-schedule",)])
def test_a_disconnect_ends_all_samples(serve, overlap: tuple[str, ...]) -> None:
    """In mid-stream, with one sample more than there are rows."""
    server = serve("--toy=delay_ms=20", "--max-running-requests=3", *overlap)
    body = {"text": "hello", "stream": True, "sampling_params": LONG | {"n": 4}}
    with httpx.stream("POST", f"{server.url}/generate", json=body, timeout=60) as response:
        assert next(response.iter_lines()).startswith("data: ")
    server.wait_idle(5)
    assert server.generate(text="b", sampling_params=PARAMS).json()["output_ids"] == expected("b")


def test_too_many_samples_are_refused_before_any_work(serve) -> None:
    server = serve()
    for n in (0, 1025, 10**9, 2**63 - 1):
        refused = server.generate(text="a", sampling_params={"n": n})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "sampling_params.n")
    assert server.generate(text="a", sampling_params=PARAMS).status_code == 200


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_priorities_and_salts_are_taken(serve, policy: str) -> None:
    """Whatever they do to order and cache, they do nothing to the ids."""
    server = serve(f"--schedule-policy={policy}", "--max-running-requests=2")
    answers = server.generate(
        text=["a", "b", "c", "a"],
        sampling_params=PARAMS,
        priority=[-5, 5, 2**31 - 1, 0],
        cache_salt=["s", None, "t", "s"],
        extra_key="k",
    ).json()
    assert ids_of(answers) == [expected(text) for text in "abca"]


def test_the_engine_gives_lists_of_samples() -> None:
    with Engine("toy") as engine:
        assert ids_of(engine.generate("hello", PARAMS | {"n": 3})) == [expected("hello")] * 3
        several = engine.generate(["a", "b"], [PARAMS | {"n": 2}, PARAMS], priority=[1, 2], cache_salt="s")
        assert ids_of(several) == [expected("a")] * 2 + [expected("b")]
        last = {c["index"]: c["output_ids"] for c in engine.generate("a", PARAMS | {"n": 2}, stream=True)}
        assert last == {0: expected("a"), 1: expected("a")}
        again = asyncio.run(engine.async_generate("c", PARAMS | {"n": 2}, extra_key="k"))
        assert ids_of(again) == [expected("c")] * 2
        for n in (10**9, 2**63 - 1):
            with pytest.raises(RequestError) as caught:
                engine.generate("a", {"n": n})
            assert caught.value.param == "sampling_params.n"
