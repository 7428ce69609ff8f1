"""POST /apply_chat_template: the prompt that a chat would have, as text."""

from __future__ import annotations

from typing import Any

import pytest

from gapless.runtime.core.messages import Submit, int32s
from gapless.runtime.tokenizer.byte_tokenizer import ByteTokenizer

MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}]
TURNS = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n"


async def apply(service: Any, **body: Any) -> Any:
    return await service.client.post("/apply_chat_template", json=body)


def test_with_and_without_the_beginning_of_the_answer(run: Any, in_process: Any) -> None:
    async def test() -> None:
        async with in_process(chat_template="chatml") as service:
            for more, end in (
                ({}, "<|im_start|>assistant\n"),
                ({"add_generation_prompt": True}, "<|im_start|>assistant\n"),
                ({"add_generation_prompt": False}, ""),
            ):
                response = await apply(service, messages=MESSAGES, **more)
                assert (response.status_code, response.json()) == (200, {"text": TURNS + end})

    run(test())


def test_a_chat_generates_from_the_same_text(run: Any, in_process: Any) -> None:
    async def test() -> None:
        async with in_process(chat_template="chatml") as service:
            text = (await apply(service, messages=MESSAGES[1:])).json()["text"]
            body = {"model": "toy", "messages": MESSAGES[1:]}
            assert (await service.client.post("/v1/chat/completions", json=body)).status_code == 200
            submit = await service.engine.take(Submit)
            assert int32s(submit.input_ids).tolist() == ByteTokenizer().encode(text)

    run(test())


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, None),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"content": "hi"}]}, "messages[0]"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "nobody", "content": "a"}]}, "messages"),
        ({"messages": MESSAGES, "add_generation_prompt": 1}, "add_generation_prompt"),
    ],
)
def test_a_wrong_body_is_400_and_named(
    run: Any, in_process: Any, body: dict[str, Any], param: str | None
) -> None:
    async def test() -> None:
        async with in_process(chat_template="chatml") as service:
            response = await apply(service, **body)
            error = response.json()["error"]
            assert (response.status_code, error["code"], error["param"]) == (400, "invalid_value", param), (
                error
            )

    run(test())


def test_a_model_without_a_template_says_so(run: Any, in_process: Any) -> None:
    async def test() -> None:
        async with in_process() as service:
            response = await apply(service, messages=MESSAGES)
            assert response.status_code == 400
            assert "no chat template" in response.json()["error"]["message"]

    run(test())


def test_while_loading_it_is_503(run: Any, in_process: Any) -> None:
    async def test() -> None:
        async with in_process(loaded=False, chat_template="chatml") as service:
            assert (await apply(service, messages=MESSAGES)).status_code == 503

    run(test())
