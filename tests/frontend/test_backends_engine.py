"""The DSL's backend for an engine in the process: the toy model's ids by their closed form."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, TypeVar

import pytest

from gapless import Engine
from gapless.frontend.backends.base import BackendError, Generated, Hint, Message, Prompt
from gapless.frontend.backends.engine import EngineBackend
from gapless.runtime.model.toy import ToyKnobs, toy_output
from gapless.runtime.tokenizer.byte_tokenizer import ByteTokenizer
from gapless.runtime.tokenizer.chat_template import ChatTemplate
from gapless.runtime.tokenizer.chat_template_builtin import BUILTIN
from gapless.runtime.tokenizer.chat_template_render import Rendering
from gapless.runtime.tokenizer.load import load_tokenizer

T = TypeVar("T")
TOKENIZER = ByteTokenizer()
PARAMS = {"max_new_tokens": 12, "ignore_eos": True}
NONE = Hint()


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine("toy", chat_template="chatml") as engine:
        yield engine


def run(call: Callable[[], Awaitable[T]]) -> T:
    async def bounded() -> T:
        async with asyncio.timeout(60):
            return await call()

    return asyncio.run(bounded())


def expected(prompt: str, count: int = 12) -> str:
    return TOKENIZER.decode(toy_output(ToyKnobs(), TOKENIZER.encode(prompt), count))


async def streamed(backend: EngineBackend, prompt: str, params: dict[str, Any]) -> list[Generated]:
    return [piece async for piece in backend.stream(Prompt(prompt), params, NONE)]


def test_one_sample_and_several(engine: Engine) -> None:
    backend = EngineBackend(engine)
    (one,) = run(lambda: backend.generate(Prompt("the hello"), PARAMS, Hint("group")))
    assert one.text == expected("the hello")
    assert one.meta["prompt_tokens"] == len(TOKENIZER.encode("the hello"))
    samples = run(lambda: backend.generate(Prompt("the hello"), PARAMS | {"n": 3}, NONE))
    assert [sample.text for sample in samples] == [expected("the hello")] * 3


@pytest.mark.parametrize("incremental", [False, True])
def test_a_streams_pieces_make_up_the_text(incremental: bool) -> None:
    with Engine("toy", incremental_streaming_output=incremental) as engine:
        backend = EngineBackend(engine)
        params = PARAMS | {"max_new_tokens": 40, "return_logprob": True}
        pieces = run(lambda: streamed(backend, "hello", params))
        (whole,) = run(lambda: backend.generate(Prompt("hello"), params, NONE))
    assert "".join(piece.text for piece in pieces) == whole.text == expected("hello", 40)
    last = dict(pieces[-1].meta)
    assert last["finish_reason"] == {"type": "length", "length": 40}
    assert last["output_token_logprobs"] == whole.meta["output_token_logprobs"]


def test_a_stream_has_one_sample(engine: Engine) -> None:
    with pytest.raises(BackendError, match="n is 2"):
        run(lambda: streamed(EngineBackend(engine), "a", {"n": 2}))


def test_what_the_engine_refuses_is_told_with_its_status(engine: Engine) -> None:
    backend = EngineBackend(engine)
    for call in (
        lambda: backend.generate(Prompt("a"), {"top_p": 2}, NONE),
        lambda: streamed(backend, "a", {"top_p": 2}),
    ):
        with pytest.raises(BackendError, match="top_p must be") as caught:
            run(call)
        assert caught.value.status == 400


def test_an_engine_that_was_shut_down() -> None:
    with Engine("toy") as engine:
        backend = EngineBackend(engine)
    with pytest.raises(BackendError, match="shut down") as caught:
        run(lambda: backend.generate(Prompt("a"), PARAMS, NONE))
    assert caught.value.status == 503


def test_a_cancelled_call_or_stream_is_aborted() -> None:
    """Else the engine, which has one row, would not come to the last call for minutes."""
    long = {"max_new_tokens": 2000, "ignore_eos": True}
    with Engine("toy", toy="delay_ms=100", max_running_requests=1) as engine:
        backend = EngineBackend(engine)

        async def check() -> Generated:
            call = asyncio.create_task(backend.generate(Prompt("a"), long, NONE))
            await asyncio.sleep(0)
            call.cancel()
            stream = backend.stream(Prompt("b"), long, NONE)
            await anext(stream)
            await stream.aclose()  # type: ignore[attr-defined]
            reading = asyncio.create_task(streamed(backend, "c", long))
            await asyncio.sleep(0)
            reading.cancel()
            (last,) = await backend.generate(Prompt("d"), {"max_new_tokens": 1, "ignore_eos": True}, NONE)
            return last

        assert run(check).text == expected("d", 1)


def test_a_commit_computes_the_prompt_once_and_holds_it_for_its_group(engine: Engine) -> None:
    backend, text = EngineBackend(engine), "the prefix that all of them share: " * 4

    async def check() -> None:
        await backend.commit(Prompt(text), Hint("held"))
        (first,) = await backend.generate(Prompt(text + "a"), PARAMS, Hint("held"))
        await backend.release("held")
        await backend.release("held")
        pages = len(TOKENIZER.encode(text)) // 16
        assert first.meta["cached_tokens"] == pages * 16

    run(check)


def test_nothing_is_sent_for_an_empty_prompt() -> None:
    backend = EngineBackend(object())  # type: ignore[arg-type]
    run(lambda: backend.commit(Prompt(""), Hint("group")))


def test_roles_by_the_models_template_and_by_name(engine: Engine) -> None:
    async def check() -> None:
        by_template, by_name = EngineBackend(engine), EngineBackend(engine, chat_template="llama-3")
        before = [Message("user", "Hi")]
        assert await by_template.role_text(before, "assistant") == ("<|im_start|>assistant\n", "<|im_end|>\n")
        assert (await by_name.role_text(before, "assistant"))[1] == "<|eot_id|>"
        with pytest.raises(BackendError, match="unknown role"):
            await by_template.role_text(before, "narrator")

    run(check)


def test_a_model_without_a_template_says_how_to_give_one() -> None:
    with Engine("toy") as engine:
        backend = EngineBackend(engine)
        with pytest.raises(BackendError, match=r"no chat template.* chat_template="):
            run(lambda: backend.role_text([], "user"))
    with pytest.raises(ValueError, match="alpaca"):
        EngineBackend(engine, chat_template="alpaca")


class TokenizerAlone:
    """What of an engine is asked about roles."""

    def __init__(self, model: str, template: str) -> None:
        self.tokenizer = load_tokenizer(model)
        special = {"bos_token": "<bos>", "eos_token": "<eos>"}
        self._template = Rendering(ChatTemplate(BUILTIN[template], special))

    async def async_tokenize(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens)

    async def async_apply_chat_template(self, messages: Any, add_generation_prompt: bool = True) -> str:
        variables = {"messages": messages, "tools": None, "add_generation_prompt": add_generation_prompt}
        return self._template.render(variables)


@pytest.mark.parametrize(("model", "template"), [("demo", "gemma"), ("demo", "chatml"), ("toy", "gemma")])
def test_the_begin_of_text_token_is_there_once(model: str, template: str) -> None:
    """The demo's tokenizer adds one to any text, the toy's none, and templates write one or not: with the tokenizer's
    own, a program's text has the tokens of the chat."""
    engine = TokenizerAlone(model, template)
    backend = EngineBackend(engine)  # type: ignore[arg-type]
    said = [
        Message("system", "Be brief."),
        Message("user", "Why?"),
        Message("assistant", "So."),
        Message("user", "?"),
    ]

    async def check() -> None:
        text = ""
        for i, message in enumerate([*said, Message("assistant", "")]):
            before, after = await backend.role_text(said[:i], message.role)
            text += before + (message.content + after if message.content else "")
        chat = await engine.async_apply_chat_template([{"role": m.role, "content": m.content} for m in said])
        of_chat = engine.tokenizer.encode(chat, add_special_tokens=False)
        tokens = engine.tokenizer.encode(text)
        bos = engine.tokenizer.bos_token_id
        assert tokens == ([bos, *of_chat] if template == "chatml" else of_chat)
        assert bos is None or tokens.count(bos) == 1

    run(check)
