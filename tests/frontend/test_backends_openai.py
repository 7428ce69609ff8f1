"""The DSL's backend for OpenAI's API, against our own server's routes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import pytest
from sglang_double import TOKENIZER, logprob_entries

from gapless.frontend.backends.base import BackendError, Generated, Hint, Message, Prompt
from gapless.frontend.backends.openai import OpenAI
from gapless.frontend.backends.select import METHODS, Tail, selected, shared_tokens
from gapless.runtime.model.toy import ToyKnobs, toy_output

T = TypeVar("T")
LENGTH, GREEDY, UNCONDITIONAL = METHODS
NONE = Hint()
PARAMS = {"max_new_tokens": 12, "ignore_eos": True}
CHAT = Prompt(
    "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
    (Message("user", "Hi"),),
)


def run(url: str, call: Callable[[OpenAI], Awaitable[T]], **options: Any) -> T:
    """What `call` gives on a backend that is closed after it."""

    async def bounded() -> T:
        backend = OpenAI("toy", base_url=f"{url}/v1", **{"extensions": ["ignore_eos", "regex"]} | options)
        try:
            async with asyncio.timeout(60):
                return await call(backend)
        finally:
            await backend.close()

    return asyncio.run(bounded())


def expected(prompt: str, count: int = 12) -> str:
    return TOKENIZER.decode(toy_output(ToyKnobs(), TOKENIZER.encode(prompt), count))


async def streamed(backend: OpenAI, prompt: Prompt, params: dict[str, Any]) -> list[Generated]:
    return [piece async for piece in backend.stream(prompt, params, NONE)]


@pytest.fixture
def url(serve) -> str:
    return serve("--chat-template=chatml").url


def test_completions_and_chats(url: str) -> None:
    """The same text in roles and as it is gives the same tokens; the text in roles is what role_text writes."""

    async def check(backend: OpenAI) -> None:
        (plain,) = await backend.generate(Prompt("hello"), PARAMS, NONE)
        assert plain.text == expected("hello")
        assert plain.meta["finish_reason"] == {"type": "length"}
        assert (plain.meta["prompt_tokens"], plain.meta["completion_tokens"]) == (5, 12)
        two = await backend.generate(CHAT, PARAMS | {"n": 2}, NONE)
        assert [sample.text for sample in two] == [expected(CHAT.text)] * 2
        before, after = await backend.role_text([], "user")
        begin, _ = await backend.role_text([Message("user", "Hi")], "assistant")
        assert before + "Hi" + after + begin == CHAT.text
        await backend.commit(CHAT, Hint("group"))
        await backend.release("group")

    run(url, check)


@pytest.mark.parametrize("prompt", [Prompt("hello"), CHAT], ids=["completion", "chat"])
def test_streams(url: str, prompt: Prompt) -> None:
    pieces = run(url, lambda backend: streamed(backend, prompt, PARAMS))
    assert "".join(piece.text for piece in pieces) == expected(prompt.text)
    assert len(pieces) >= 2
    meta = pieces[-1].meta
    assert meta["finish_reason"] == {"type": "length"}
    assert meta["completion_tokens"] == 12


def test_parameters_by_openais_names(serve, tmp_path) -> None:
    script = tmp_path / "ids"
    script.write_text(" ".join(str(i) for i in b"one two END and more. "))
    server = serve(f"--toy=script={script}", "--chat-template=chatml")

    async def check(backend: OpenAI) -> None:
        params = {
            "stop": ["END"],
            "temperature": 0,
            "sampling_seed": 1,
            "logit_bias": {"5": 1.0},
            "top_p": None,
        }
        for prompt in (Prompt("a"), CHAT):
            (stopped,) = await backend.generate(prompt, params, NONE)
            assert stopped.text == "one two "
            assert stopped.meta["finish_reason"] == {"type": "stop", "matched": "END"}
        (default,) = await backend.generate(Prompt("a"), {"ignore_eos": True}, NONE)
        assert default.meta["completion_tokens"] == 128

    run(server.url, check)


def test_a_json_schema_and_a_regex(url: str) -> None:
    schema = {
        "type": "object",
        "properties": {"n": {"enum": [1, 22]}},
        "required": ["n"],
        "additionalProperties": False,
    }

    async def check(backend: OpenAI) -> None:
        (answer,) = await backend.generate(CHAT, {"json_schema": json.dumps(schema)}, NONE)
        assert json.loads(answer.text)["n"] in (1, 22)
        (digits,) = await backend.generate(Prompt("a"), {"regex": "[0-9]{4}"}, NONE)
        assert len(digits.text) == 4 and digits.text.isdigit()

    run(url, check)


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        (CHAT, {"ignore_eos": True}, r"OpenAI\('toy'\): ignore_eos .* extensions=\['ignore_eos'\]"),
        (CHAT, {"regex": "a"}, "regex is no part of OpenAI's API"),
        (CHAT, {"top_k": 5}, "top_k is no part of OpenAI's API"),
        (CHAT, {"return_logprob": True}, "return_logprob is no part of OpenAI's API$"),
        (Prompt("a"), {"json_schema": "{}"}, "json_schema is no part of OpenAI's API of completions"),
        (Prompt(CHAT.text + "Well,", CHAT.messages), {}, "cannot go on with a turn .*'Well,'"),
    ],
)
def test_what_the_api_cannot_do_is_refused_before_anything_is_sent(
    prompt: Prompt, params: dict[str, Any], message: str
) -> None:
    nowhere = "http://127.0.0.1:9"
    with pytest.raises(BackendError, match=message):
        run(nowhere, lambda backend: backend.generate(prompt, params, NONE), extensions=[])
    with pytest.raises(BackendError, match=message):
        run(nowhere, lambda backend: streamed(backend, prompt, params), extensions=[])


def test_a_model_for_chats_or_for_completions_alone(url: str) -> None:
    with pytest.raises(BackendError, match="say all text in roles"):
        run(url, lambda backend: backend.generate(Prompt("a"), {}, NONE), is_chat_model=True)
    with pytest.raises(BackendError, match="say chat_template="):
        run(url, lambda backend: backend.role_text([], "user"), is_chat_model=False)
    completion = {"is_chat_model": False, "chat_template": "chatml"}
    (answer,) = run(url, lambda backend: backend.generate(CHAT, PARAMS, NONE), **completion)
    assert answer.text == expected(CHAT.text)
    with pytest.raises(ValueError, match="'beam_search'"):
        OpenAI("toy", extensions=["beam_search"])


def test_a_refusal_has_the_servers_words_and_status(url: str) -> None:
    with pytest.raises(BackendError, match=r"answered 400: .*temperature") as caught:
        run(url, lambda backend: backend.generate(CHAT, {"temperature": -1}, NONE))
    assert caught.value.status == 400
    with pytest.raises(BackendError, match=r"answered 400: .*temperature"):
        run(url, lambda backend: streamed(backend, Prompt("a"), {"temperature": -1}))


def test_a_key_from_the_environment(serve, monkeypatch: pytest.MonkeyPatch) -> None:
    server = serve("--api-key=secret")
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    assert run(server.url, lambda b: b.generate(Prompt("a"), PARAMS, NONE))[0].text == expected("a")
    monkeypatch.delenv("OPENAI_API_KEY")
    with pytest.raises(BackendError, match="answered 401"):
        run(server.url, lambda backend: backend.generate(Prompt("a"), PARAMS, NONE))
    assert server.stop() == 0  # the fixture has no key


@pytest.mark.parametrize("method", [LENGTH, GREEDY])
def test_select_by_echoed_log_probabilities(url: str, method: str) -> None:
    prompt, choices = "I think that it is", [" an apple", " a pear", " nothing", " a"]
    texts = [TOKENIZER.encode(prompt + choice) for choice in choices]
    start = shared_tokens(texts)
    given = [[entry[0] for entry in logprob_entries(text, start - 1)[1:]] for text in texts]
    tails = [Tail(tuple(text[start:]), tuple(values)) for text, values in zip(texts, given, strict=True)]
    want = selected(choices, tails, method, {})
    found = run(url, lambda backend: backend.select(Prompt(prompt), choices, method, NONE))
    assert (found.index, found.choice) == (want.index, want.choice)
    assert found.scores == pytest.approx(want.scores, rel=1e-5)


def test_what_select_cannot_do(url: str) -> None:
    async def check(backend: OpenAI) -> None:
        with pytest.raises(
            BackendError, match="unconditional_likelihood_normalized needs prompts of token ids"
        ):
            await backend.select(Prompt("a b"), ["c", "d"], UNCONDITIONAL, NONE)
        with pytest.raises(BackendError, match="choices_method='greedy_token_selection' works"):
            await backend.select(CHAT, ["c", "d"], LENGTH, NONE)
        with pytest.raises(BackendError, match="text before the choices"):
            await backend.select(Prompt(""), ["c", "d"], LENGTH, NONE)

    run(url, check)


def test_in_a_chat_the_model_writes_its_choice(url: str) -> None:
    """Each is found by some prompt: what is taken is what the model has written."""
    choices = ["apple", 'the "quoted" one', "in"]

    async def check(backend: OpenAI) -> set[str]:
        taken = set()
        for word in map(str, range(12)):
            text = CHAT.text.replace("Hi", word)
            found = await backend.select(Prompt(text, (Message("user", word),)), choices, GREEDY, NONE)
            assert found.choice == choices[found.index]
            assert found.scores == tuple(float(choice == found.choice) for choice in choices)
            taken.add(found.choice)
        return taken

    assert len(run(url, check)) > 1


@pytest.mark.parametrize(
    ("prompt", "method", "message"),
    [(CHAT, GREEDY, "wrote 'Certainly!'"), (Prompt("a b"), LENGTH, "echoes no log probabilities")],
)
def test_a_server_that_does_not_heed_what_it_is_asked(prompt: Prompt, method: str, message: str) -> None:
    choice = {"message": {"content": "Certainly!"}, "text": None, "finish_reason": "stop"}
    body = json.dumps({"choices": [choice | {"index": 0}]}).encode()
    response = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\nconnection: close\r\n\r\n%b" % (len(body), body)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(response)
        await writer.drain()
        writer.close()

    async def check() -> None:
        async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
            backend = OpenAI("m", base_url=f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
            with pytest.raises(BackendError, match=message):
                await backend.select(prompt, ["yes", "no"], method, NONE)
            await backend.close()

    asyncio.run(asyncio.wait_for(check(), 30))
