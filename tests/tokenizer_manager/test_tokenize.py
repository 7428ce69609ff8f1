"""POST /tokenize and /detokenize."""

from __future__ import annotations

from typing import Any

import pytest

from gapless.runtime.tokenizer.byte_tokenizer import ByteTokenizer


@pytest.mark.parametrize("field", ["prompt", "text"])
def test_one_text_or_a_list(run: Any, in_process: Any, field: str) -> None:
    async def test() -> None:
        async with in_process() as service:
            answer = await service.client.post("/tokenize", json={field: "the cat", "model": "any"})
            want = ByteTokenizer().encode("the cat")
            assert answer.json() == {"tokens": want, "count": len(want), "max_model_len": 64}
            answer = await service.client.post("/tokenize", json={field: ["the", "", "é"]})
            assert answer.json()["tokens"] == [ByteTokenizer().encode(text) for text in ("the", "", "é")]
            assert answer.json()["count"] == [1, 0, 2]

    run(test())


def test_special_tokens_are_the_clients_choice(run: Any, in_process: Any) -> None:
    class Tokenizer(ByteTokenizer):
        def encode_batch(self, texts: Any, add_special_tokens: bool = True) -> list[list[int]]:
            return [[256] * add_special_tokens + self.encode(text) for text in texts]

    async def test() -> None:
        async with in_process() as service:
            service.front.tokenizer = Tokenizer()
            for body, want in (({}, [256, 97]), ({"add_special_tokens": False}, [97])):
                answer = await service.client.post("/tokenize", json={"prompt": "a"} | body)
                assert answer.json()["tokens"] == want

    run(test())


def test_there_and_back(run: Any, in_process: Any) -> None:
    """Both clients' names for the text; a list of lists gives a list."""

    async def test() -> None:
        async with in_process() as service:
            ids = (await service.client.post("/tokenize", json={"text": "naïve 語 ☂"})).json()["tokens"]
            answer = await service.client.post("/detokenize", json={"tokens": ids})
            assert answer.json() == {"text": "naïve 語 ☂", "prompt": "naïve 語 ☂"}
            answer = await service.client.post("/detokenize", json={"tokens": [ids, [], [97, 256]]})
            assert answer.json()["text"] == ["naïve 語 ☂", "", "a"]
            answer = await service.client.post(
                "/detokenize", json={"tokens": [97, 256], "skip_special_tokens": False}
            )
            assert answer.json()["text"] == "a<eos>"
            assert (await service.client.post("/detokenize", json={"tokens": []})).json()["text"] == ""

    run(test())


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "text": "a"}, "prompt"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/tokenize", {"prompt": ["a", 5]}, "prompt[1]"),
        ("/tokenize", {"prompt": ["a"] * 9}, "prompt"),
        ("/tokenize", {"text": "a", "add_special_tokens": "yes"}, "add_special_tokens"),
        ("/detokenize", {}, None),
        ("/detokenize", {"tokens": None}, None),
        ("/detokenize", {"tokens": 5}, "tokens"),
        ("/detokenize", {"tokens": [1, 600]}, "tokens[1]"),
        ("/detokenize", {"tokens": [1, -1]}, "tokens[1]"),
        ("/detokenize", {"tokens": [1.5]}, "tokens[0]"),
        ("/detokenize", {"tokens": [True]}, "tokens[0]"),
        ("/detokenize", {"tokens": [2**70]}, "tokens[0]"),
        ("/detokenize", {"tokens": [1, [2]]}, "tokens[1]"),
        ("/detokenize", {"tokens": [[1], 2]}, "tokens[1]"),
        ("/detokenize", {"tokens": [[1], [999]]}, "tokens[1][0]"),
        ("/detokenize", {"tokens": [[1]] * 9}, "tokens"),
    ],
)
def test_a_wrong_body_is_400_and_named(
    run: Any, in_process: Any, path: str, body: dict[str, Any], param: str | None
) -> None:
    async def test() -> None:
        async with in_process(max_batch_requests=8) as service:
            response = await service.client.post(path, json=body)
            assert response.status_code == 400
            error = response.json()["error"]
            assert (error["code"], error["param"]) == ("invalid_value", param), error

    run(test())


@pytest.mark.parametrize(
    "content", [b"", b"[]", b"5", b"{", b'"' + b"x" * 2000 + b'"', b'{"tokens":' + b"[" * 5000]
)
def test_what_is_no_json_object_is_a_4xx(run: Any, in_process: Any, content: bytes) -> None:
    async def test() -> None:
        async with in_process(max_body_bytes=8192) as service:
            for path in ("/tokenize", "/detokenize", "/abort_request"):
                response = await service.client.post(path, content=content)
                assert response.status_code == 400
                assert response.json()["error"]["code"] == "invalid_value"
                response = await service.client.post(path, content=b" " * 9000)
                assert response.status_code == 413
            assert service.front.body_room.free == 64 * 8192

    run(test())


def test_while_loading_it_is_503(run: Any, in_process: Any) -> None:
    async def test() -> None:
        async with in_process(loaded=False) as service:
            for path, body in (("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [1]})):
                response = await service.client.post(path, json=body)
                assert (response.status_code, response.headers["retry-after"]) == (503, "1")

    run(test())
