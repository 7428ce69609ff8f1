"""The DSL's backend for a server: ours in real processes, and one that answers as SGLang's."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import pytest
from sglang_double import sglang_double

from gapless.frontend.backends.base import Backend, BackendError, Generated, Hint, Message, Prompt
from gapless.frontend.backends.endpoint import RuntimeEndpoint
from gapless.runtime.model.toy import ToyKnobs, toy_output
from gapless.runtime.tokenizer.byte_tokenizer import ByteTokenizer

T = TypeVar("T")
TOKENIZER = ByteTokenizer()
PARAMS = {"max_new_tokens": 12, "ignore_eos": True}
LONG = {"max_new_tokens": 2000, "ignore_eos": True}
NONE = Hint()


def run(url: str, call: Callable[[RuntimeEndpoint], Awaitable[T]], **options: Any) -> T:
    """What `call` gives on a backend that is closed after it."""

    async def bounded() -> T:
        backend = RuntimeEndpoint(url, **options)
        try:
            async with asyncio.timeout(60):
                return await call(backend)
        finally:
            await backend.close()

    return asyncio.run(bounded())


def expected(prompt: str, count: int = 12) -> str:
    return TOKENIZER.decode(toy_output(ToyKnobs(), TOKENIZER.encode(prompt), count))


async def streamed(backend: Backend, prompt: str, params: dict[str, Any]) -> list[Generated]:
    return [piece async for piece in backend.stream(Prompt(prompt), params, NONE)]


@pytest.mark.parametrize("options", [(), ("--incremental-streaming-output",)], ids=["cumulative", "new"])
def test_our_server(serve, options: tuple[str, ...]) -> None:
    server = serve("--chat-template=chatml", *options)

    async def check(backend: RuntimeEndpoint) -> None:
        text = "what they share, more than a page of it: " * 2
        hint = Hint("some group")
        await backend.commit(Prompt(text), hint)
        samples = await backend.generate(Prompt(text), PARAMS | {"n": 2}, hint)
        assert [sample.text for sample in samples] == [expected(text)] * 2
        assert samples[0].meta["cached_tokens"] >= 64
        pieces = await streamed(backend, "hello", PARAMS | {"max_new_tokens": 40, "return_logprob": True})
        assert "".join(piece.text for piece in pieces) == expected("hello", 40)
        meta = pieces[-1].meta
        assert meta["finish_reason"] == {"type": "length", "length": 40}
        assert [entry[1] for entry in meta["output_token_logprobs"]] == toy_output(
            ToyKnobs(), list(b"hello"), 40
        )
        await backend.release("some group")
        await backend.release("one that nobody knows")
        assert await backend.role_text([Message("user", "Hi")], "assistant") == (
            "<|im_start|>assistant\n",
            "<|im_end|>\n",
        )

    run(server.url, check)


def test_a_refusal_has_the_servers_words_and_status(serve) -> None:
    server = serve()

    async def check(backend: RuntimeEndpoint) -> None:
        for call in (
            lambda: backend.generate(Prompt("a"), {"top_p": 2}, NONE),
            lambda: streamed(backend, "a", {"top_p": 2}),
        ):
            with pytest.raises(BackendError, match=r"/generate answered 400: top_p must be") as caught:
                await call()
            assert caught.value.status == 400
        with pytest.raises(BackendError, match=r"no chat template.* chat_template="):
            await backend.role_text([], "user")

    run(server.url, check)


def test_a_key(serve) -> None:
    server = serve("--api-key=secret")
    with pytest.raises(BackendError, match="answered 401"):
        run(server.url, lambda backend: backend.generate(Prompt("a"), PARAMS, NONE))
    (answer,) = run(server.url, lambda b: b.generate(Prompt("a"), PARAMS, NONE), api_key="secret")
    assert answer.text == expected("a")
    assert server.stop() == 0  # the fixture has no key


def test_a_server_that_is_full_or_not_there(serve) -> None:
    server = serve("--toy=delay_ms=50", "--max-queued-requests=1")

    async def check(backend: RuntimeEndpoint) -> None:
        stream = backend.stream(Prompt("a"), LONG, NONE)
        await anext(stream)
        with pytest.raises(BackendError, match="answered 503") as caught:
            await backend.generate(Prompt("b"), PARAMS, NONE)
        assert caught.value.status == 503
        await stream.aclose()  # type: ignore[attr-defined]

    run(server.url, check)
    server.wait_idle()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with pytest.raises(BackendError, match=f"127.0.0.1:{port}") as caught:
        run(f"http://127.0.0.1:{port}", lambda backend: backend.generate(Prompt("a"), PARAMS, NONE))
    assert caught.value.status is None


def test_cancelling_aborts(serve) -> None:
    server = serve("--toy=delay_ms=20")

    async def check(backend: RuntimeEndpoint) -> None:
        call = asyncio.create_task(backend.generate(Prompt("a"), LONG, NONE))
        stream = backend.stream(Prompt("b"), LONG, NONE)
        await anext(stream)
        call.cancel()
        await stream.aclose()  # type: ignore[attr-defined]
        await asyncio.to_thread(server.wait_idle)

    run(server.url, check)


def test_a_server_that_dies_in_mid_stream(serve) -> None:
    server = serve("--toy=delay_ms=20,raise_at_step=20")

    async def check(backend: RuntimeEndpoint) -> None:
        text = ""
        with pytest.raises(BackendError, match="stopped"):
            async for piece in backend.stream(Prompt("a"), LONG, NONE):
                text += piece.text
        assert text and expected("a", 40).startswith(text)

    run(server.url, check)
    assert server.wait() != 0


@pytest.mark.parametrize(
    ("tail", "message"),
    [
        (b"", "closed by the server"),
        (b"0\r\n\r\n", "without its last event"),
        (b"5\r\ndata:\r\n9\r\n nonsense\r\n2\r\n\n\n\r\n0\r\n\r\n", "not JSON"),
    ],
)
def test_a_stream_that_breaks_off(tail: bytes, message: str) -> None:
    """`tail` is what comes after the first event, before the connection is closed."""
    event = b'data: {"text": "ab", "meta_info": {}}\n\n'
    head = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n" + b"%x\r\n%b\r\n" % (len(event), event)
    info = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}"

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        request = await reader.readuntil(b"\r\n\r\n")
        writer.write(info if request.startswith(b"GET") else head + tail)
        await writer.drain()
        writer.close()

    async def check() -> list[str]:
        pieces: list[str] = []
        async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            backend = RuntimeEndpoint(f"http://127.0.0.1:{port}")
            with pytest.raises(BackendError, match=message):
                async for piece in backend.stream(Prompt("a"), {}, NONE):
                    pieces.append(piece.text)
            await backend.close()
        return pieces

    assert asyncio.run(asyncio.wait_for(check(), 30)) == ["ab"]


def test_sglangs_server_unchanged() -> None:
    """Hints are sent with requests, and are no concern where there is no route for them; streams are cumulative."""
    with sglang_double() as server:

        async def check(backend: RuntimeEndpoint) -> None:
            hint = Hint("group")
            await backend.commit(Prompt("the prompt"), hint)
            (one,) = await backend.generate(Prompt("the prompt"), PARAMS, hint)
            assert one.text == expected("the prompt")
            pieces = await streamed(backend, "the prompt", PARAMS)
            assert "".join(piece.text for piece in pieces) == expected("the prompt")
            assert len(pieces) == 12
            await backend.release("group")
            await backend.release("another")
            assert await backend.role_text([], "user") == ("<|im_start|>user\n", "<|im_end|>\n")
            assert await backend.role_text([Message("user", "")], "assistant") == (
                "<|im_start|>assistant\n",
                "<|im_end|>\n",
            )

        run(server.url, check)
        assert len(server.bodies("/release_group")) == 1
        assert len(server.bodies("/apply_chat_template")) == 1
        assert server.bodies("/generate")[0] == {
            "text": "the prompt",
            "sampling_params": {"max_new_tokens": 0},
            "group_id": "group",
            "hold_prefix": True,
        }


def test_a_model_that_tells_no_chat_format() -> None:
    with sglang_double("some/model") as server:
        with pytest.raises(BackendError, match="'some/model': say chat_template="):
            run(server.url, lambda backend: backend.role_text([], "user"))
        given = run(server.url, lambda backend: backend.role_text([], "user"), chat_template="gemma")
        assert given == ("<start_of_turn>user\n", "<end_of_turn>\n")


def test_more_calls_than_connections(serve) -> None:
    """A thousand calls at once: each gets its answer, by the few hundred connections that there are."""
    server = serve("--max-queued-requests=2000")

    async def check(backend: RuntimeEndpoint) -> None:
        prompts = [f"call {i}" for i in range(1000)]
        calls = (backend.generate(Prompt(p), PARAMS | {"max_new_tokens": 2}, NONE) for p in prompts)
        answers = await asyncio.gather(*calls)
        assert [answer[0].text for answer in answers] == [expected(p, 2) for p in prompts]

    run(server.url, check)


@pytest.mark.parametrize("url", ["", "localhost:30000", "ftp://host"])
def test_what_is_no_url(url: str) -> None:
    with pytest.raises(ValueError, match="http"):
        RuntimeEndpoint(url)
