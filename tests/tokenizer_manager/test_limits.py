"""What is too much is refused before any work, by a short answer, and hurts nobody else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import orjson
import pytest

_TOO_MUCH: dict[str, tuple[Callable[[], dict[str, Any]], int, str | None]] = {
    "n": (lambda: {"text": "a", "sampling_params": {"n": 10**9}}, 400, "sampling_params.n"),
    "n of 64 bits": (lambda: {"text": "a", "sampling_params": {"n": 2**63 - 1}}, 400, "sampling_params.n"),
    "n above the batch": (lambda: {"text": "a", "sampling_params": {"n": 1025}}, 400, "sampling_params.n"),
    "n times batch": (lambda: {"text": ["a"] * 33, "sampling_params": {"n": 32}}, 400, "sampling_params.n"),
    "batch": (lambda: {"text": ["a"] * 100_000}, 400, "text"),
    "batch of ids": (lambda: {"input_ids": [[1]] * 100_000}, 400, "input_ids"),
    "stop strings": (lambda: {"text": "a", "sampling_params": {"stop": ["x"] * 10**6}}, 400, "sampling_params.stop"),
    "a stop string": (lambda: {"text": "a", "sampling_params": {"stop": "x" * 10**6}}, 400, "sampling_params.stop"),
    "stop ids": (
        lambda: {"text": "a", "sampling_params": {"stop_token_ids": [1] * 10**6}}, 400,
        "sampling_params.stop_token_ids",
    ),
    "biases": (
        lambda: {"text": "a", "sampling_params": {"logit_bias": {str(i): 1 for i in range(10**5)}}}, 400,
        "sampling_params.logit_bias",
    ),
    "rid": (lambda: {"text": "a", "rid": "x" * 10**7}, 400, "rid"),
    "extra_key": (lambda: {"text": "a", "extra_key": "x" * 10**7}, 400, "extra_key"),
    "text": (lambda: {"text": "x" * 10**7}, 400, "text"),
    "ids": (lambda: {"input_ids": [1] * 10**6}, 400, "input_ids"),
    "body": (lambda: {"text": "x" * 2**24}, 413, None),
    "an unknown field's name": (lambda: {"text": "", "x" * 10**6: 1}, 400, "text"),
}  # fmt: skip


@pytest.mark.parametrize("what", _TOO_MUCH)
def test_it_is_a_4xx_before_any_work(run: Any, in_process: Any, what: str) -> None:
    make, status, param = _TOO_MUCH[what]

    async def test() -> None:
        async with in_process() as service:
            response = await service.client.post("/generate", content=orjson.dumps(make()))
            assert response.status_code == status
            assert response.json()["error"]["param"] == param
            assert len(response.content) < 1000
            assert service.engine.sent == []
            assert len(service.front.registry) == 0
            assert service.front.body_room.free == 64 * service.front.body_room.limit
            assert (await service.generate(text="ok")).status_code == 200

    run(test())


@pytest.mark.parametrize("content", [b"[" * 10**6, b'{"a":' * 10**6, b'{"sampling_params":' + b"[" * 10**6])
def test_depth_is_a_400(run: Any, in_process: Any, content: bytes) -> None:
    async def test() -> None:
        async with in_process() as service:
            for path in ("/generate", "/tokenize", "/detokenize", "/abort_request"):
                response = await service.client.post(path, content=content)
                assert (response.status_code, response.json()["error"]["code"]) == (400, "invalid_value")

    run(test())
