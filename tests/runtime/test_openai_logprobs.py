"""Log probabilities as the openai client reads them, from the real server."""

from __future__ import annotations

from typing import Any

import openai
import pytest

CHAT = {"model": "toy", "messages": [{"role": "user", "content": "Hi"}]}


def connect(server: Any) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


@pytest.mark.parametrize("stream_interval", [1, 4])
def test_rows_of_a_chat_are_the_same_whole_and_streamed(serve: Any, stream_interval: int) -> None:
    """Each row has its own alternatives, and the bytes together are the text, also where it ends by EOS."""
    server = serve("--chat-template=chatml", "--toy=eos_at=9", f"--stream-interval={stream_interval}")
    with connect(server) as client:
        body: dict[str, Any] = CHAT | {
            "logprobs": True,
            "top_logprobs": 3,
            "temperature": 0,
            "max_tokens": 40,
        }
        (choice,) = client.chat.completions.create(**body).choices
        rows = choice.logprobs.content
        assert choice.finish_reason == "stop"
        assert bytes(b for row in rows for b in row.bytes).decode(errors="replace") == choice.message.content
        assert len({tuple(best.token for best in row.top_logprobs) for row in rows}) > 1
        for row in rows:
            scores = [best.logprob for best in row.top_logprobs]
            assert scores == sorted(scores, reverse=True)
            assert len(scores) == 3
            same = [best.logprob for best in row.top_logprobs if best.bytes == row.bytes]
            assert same == [row.logprob] if same else row.logprob <= scores[-1]
        chunks = list(client.chat.completions.create(**body, stream=True))
        streamed = [row for c in chunks if c.choices[0].logprobs for row in c.choices[0].logprobs.content]
        assert streamed == rows


def test_a_completions_rows_say_where_their_text_begins(serve: Any) -> None:
    server = serve()
    with connect(server) as client:
        body: dict[str, Any] = {
            "model": "toy",
            "prompt": "abc",
            "logprobs": 2,
            "max_tokens": 12,
            "n": 2,
            "seed": 5,
        }
        whole = client.completions.create(**body)
        streamed: dict[int, dict[str, list[Any]]] = {0: {}, 1: {}}
        for chunk in client.completions.create(**body, stream=True):
            for name, values in chunk.choices[0].logprobs.model_dump().items():
                streamed[chunk.choices[0].index].setdefault(name, []).extend(values)
        for choice in whole.choices:
            rows = choice.logprobs
            assert streamed[choice.index] == rows.model_dump()
            assert len(rows.tokens) == len(rows.token_logprobs) == 12
            assert all(len(best) == 2 for best in rows.top_logprobs)
            for token, start in zip(rows.tokens, rows.text_offset, strict=True):
                assert token.startswith("bytes:") or choice.text.startswith(token, start)


@pytest.mark.parametrize("max_tokens", [0, 2])
def test_an_echo_scores_the_prompt(serve: Any, max_tokens: int) -> None:
    """As evaluations do it: the prompt's tokens with their log probabilities, the first of which has none."""
    server = serve()
    with connect(server) as client:
        prompts = [[97, 98, 99], [100, 101]]
        body: dict[str, Any] = {
            "model": "toy",
            "max_tokens": max_tokens,
            "echo": True,
            "logprobs": 1,
            "temperature": 0,
        }
        answer = client.completions.create(**body, prompt=prompts)
        for choice, prompt in zip(answer.choices, prompts, strict=True):
            size = len(prompt)
            assert choice.text.startswith(bytes(prompt).decode())
            assert choice.logprobs.tokens[:size] == [chr(token_id) for token_id in prompt]
            assert len(choice.logprobs.token_logprobs) == size + max_tokens
            first, *others = choice.logprobs.token_logprobs
            assert first is None
            assert all(score <= 0 for score in others)
            assert choice.logprobs.top_logprobs[0] is None
            assert all(len(best) == 1 for best in choice.logprobs.top_logprobs[1:])
            assert choice.logprobs.text_offset[:size] == list(range(size))
        (chunk, *_) = client.completions.create(**body, prompt=prompts[0], stream=True)
        assert chunk.choices[0].text.startswith("abc")
        assert chunk.choices[0].logprobs.tokens[:3] == ["a", "b", "c"]


def test_an_echo_without_scores(serve: Any) -> None:
    server = serve()
    with connect(server) as client:
        plain = client.completions.create(model="toy", prompt="abc", max_tokens=5).choices[0].text
        body: dict[str, Any] = {"model": "toy", "prompt": "abc", "max_tokens": 5, "echo": True}
        assert client.completions.create(**body).choices[0].text == "abc" + plain
        chunks = client.completions.create(**body, stream=True)
        assert "".join(chunk.choices[0].text for chunk in chunks) == "abc" + plain


def test_what_is_asked_wrongly(serve: Any) -> None:
    server = serve("--chat-template=chatml")
    with connect(server) as client:
        for body, param in (
            ({"top_logprobs": 2}, "top_logprobs"),
            ({"logprobs": True, "top_logprobs": 129}, "top_logprobs"),
            ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
        ):
            with pytest.raises(openai.BadRequestError) as refused:
                client.chat.completions.create(**CHAT, **body)
            assert refused.value.param == param
        with pytest.raises(openai.BadRequestError) as refused:
            client.completions.create(model="toy", prompt="a", logprobs=129)
        assert refused.value.param == "logprobs"
        with pytest.raises(openai.BadRequestError) as refused:
            client.completions.create(model="toy", prompt=[511, 512], echo=True)
        assert refused.value.status_code == 400
