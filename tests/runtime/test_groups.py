"""Commits, holds and their release, chat templates and token ids: by the engine, and over a real server."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from gapless import Engine
from gapless.runtime.core.errors import RequestError, UnavailableError

NOTHING = {"max_new_tokens": 0}
PREFIX = "z" * 65  # four whole pages
MESSAGES = [{"role": "user", "content": "hi"}]
RENDERED = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine("toy", page_size=16, chat_template="chatml") as engine:
        yield engine


@pytest.fixture(scope="module")
def small() -> Iterator[Engine]:
    """An engine whose pool holds three prompts of five pages."""
    with Engine("toy", page_size=16, max_total_tokens=256) as engine:
        yield engine


def cached(answer: dict[str, Any]) -> int:
    return int(answer["meta_info"]["cached_tokens"])


def press(engine: Engine) -> None:
    """More other prompts than the pool holds, one after the other."""
    for letter in "abcdefgh":
        engine.generate(letter * 70, {"max_new_tokens": 1})


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_for_no_tokens_computes_the_whole_prompt(engine: Engine, stream: bool) -> None:
    """One, and in a batch beside others; all whole pages are there afterwards, the last one of the prompt, too."""
    prompts = [f"{stream}{i:2}".ljust(length, "x") for i, length in enumerate((64, 65, 80, 9))]
    counts = [0, 3, 0, 0]
    params = [{"max_new_tokens": count, "ignore_eos": True} for count in counts]
    answers = engine.generate(prompts, params, stream=stream)
    if stream:
        last = {chunk["index"]: chunk for chunk in answers}
        answers = [last[i] for i in range(4)]
    assert [len(answer["output_ids"]) for answer in answers] == counts
    assert [answer["meta_info"]["finish_reason"] for answer in answers] == [
        {"type": "length", "length": count} for count in counts
    ]
    assert answers[0]["text"] == ""
    assert answers[0]["meta_info"]["prompt_tokens"] == 64
    longer = engine.generate([prompt + "?" for prompt in prompts], NOTHING)
    assert [cached(answer) for answer in longer] == [64, 64, 80, 0]
    single = engine.generate(f"{stream}".ljust(48, "y"), NOTHING, stream=stream)
    chunks = list(single) if stream else [single]
    assert [(chunk["text"], chunk["output_ids"]) for chunk in chunks] == [("", [])]


def test_a_held_prefix_outlives_others_until_it_is_released(small: Engine) -> None:
    small.generate(PREFIX, NOTHING, group_id="g", hold_prefix=True)
    press(small)
    assert cached(small.generate(PREFIX + "a", NOTHING, group_id="g")) == 64
    small.release_group("g")
    small.release_group("g")
    press(small)
    assert cached(small.generate(PREFIX + "b", NOTHING)) == 0


def test_the_same_from_a_coroutine(small: Engine) -> None:
    async def test() -> None:
        await small.async_generate(
            [PREFIX, "b" * 40], NOTHING, group_id=["g", "h"], hold_prefix=[True, False]
        )
        await asyncio.to_thread(press, small)
        assert cached(await small.async_generate(PREFIX + "a", NOTHING)) == 64
        await small.async_release_group("g")
        assert small.flush_cache()

    asyncio.run(test())


def test_holds_do_not_keep_a_cache_from_being_flushed(engine: Engine) -> None:
    assert engine.flush_cache(timeout=10)
    engine.generate(PREFIX, NOTHING, group_id="g", hold_prefix=True)
    assert engine.flush_cache(timeout=10).pages == 4
    assert cached(engine.generate(PREFIX + "a", NOTHING)) == 0


def test_token_ids(engine: Engine) -> None:
    async def tokenize(text: str) -> list[int]:
        return await engine.async_tokenize(text, add_special_tokens=False)

    long = "the cat " * 4000
    ids = engine.tokenize("the cat")
    assert ids == asyncio.run(tokenize("the cat"))
    assert engine.generate(input_ids=ids, sampling_params=NOTHING)["meta_info"]["prompt_tokens"] == len(ids)
    assert engine.tokenize("") == []
    assert engine.tokenize(long) == asyncio.run(tokenize(long)) == engine.tokenize("the cat ") * 4000
    with pytest.raises(RequestError) as caught:
        engine.tokenize(["the"])  # type: ignore[arg-type]
    assert caught.value.param == "text"


def test_chat_templates(engine: Engine) -> None:
    async def apply() -> str:
        return await engine.async_apply_chat_template(MESSAGES, add_generation_prompt=False)

    assert engine.apply_chat_template(MESSAGES) == RENDERED
    assert asyncio.run(apply()) == RENDERED.removesuffix("<|im_start|>assistant\n")


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        ("hi", "messages"),
        ([{"content": "hi"}], "messages[0]"),
        ([{"role": "user", "content": "\ud800"}], "messages"),
        ([{"role": "user", "content": object()}], "messages"),
        ([{"role": "nobody", "content": "hi"}], "messages"),
    ],
)
def test_wrong_messages_are_named(engine: Engine, messages: Any, param: str) -> None:
    with pytest.raises(RequestError) as caught:
        engine.apply_chat_template(messages)
    assert caught.value.param == param


def test_a_model_without_a_template_says_so(small: Engine) -> None:
    with pytest.raises(RequestError, match="no chat template"):
        small.apply_chat_template(MESSAGES)


def test_the_template_process_starts_when_needed_and_ends_with_the_engine(
    watch: Any, children_of: Any
) -> None:
    others = set(children_of(os.getpid()))
    engine = Engine("toy", chat_template="chatml")
    assert len(set(children_of(os.getpid())) - others) == 1
    engine.apply_chat_template(MESSAGES)
    started = set(children_of(os.getpid())) - others
    assert len(started) == 2
    children = [watch(pid) for pid in started]
    engine.shutdown()
    assert all(child.within(5) for child in children)
    for call in (
        lambda: engine.apply_chat_template(MESSAGES),
        lambda: engine.tokenize("a"),
        lambda: engine.release_group("g"),
    ):
        with pytest.raises(UnavailableError):
            call()


@pytest.mark.parametrize("group", ["", 5, None, "x" * 257])
def test_a_wrong_group_is_named(engine: Engine, group: Any) -> None:
    with pytest.raises(RequestError) as caught:
        engine.release_group(group)
    assert caught.value.param == "group_id"


def test_over_http(serve: Any) -> None:
    server = serve("--page-size=16", "--max-total-tokens=256", "--chat-template=chatml")
    commit = {"text": PREFIX, "sampling_params": NOTHING, "group_id": "g", "hold_prefix": True}
    assert server.generate(**commit).json()["text"] == ""
    events = httpx.post(f"{server.url}/generate", json=commit | {"stream": True}, timeout=60).text.split(
        "\n\n"
    )
    assert len(events) == 3 and events[1] == "data: [DONE]"
    for letter in "abcdefgh":
        server.generate(text=letter * 70, sampling_params={"max_new_tokens": 1})
    assert cached(server.generate(text=PREFIX + "a", sampling_params=NOTHING).json()) == 64
    server.wait_info("used_tokens", 64)
    body = {"group_id": "g"}
    assert httpx.post(f"{server.url}/release_group", json=body, timeout=60).json() == {"success": True}
    server.wait_info("used_tokens", 0)
    body = {"messages": MESSAGES}
    assert httpx.post(f"{server.url}/apply_chat_template", json=body, timeout=60).json() == {"text": RENDERED}
