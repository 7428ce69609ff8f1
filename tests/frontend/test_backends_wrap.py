"""What can be given where a backend is wanted."""

from __future__ import annotations

import asyncio
import subprocess
import sys

import pytest

from gapless import Engine
from gapless.frontend.backends.base import Hint, Prompt
from gapless.frontend.backends.endpoint import RuntimeEndpoint
from gapless.frontend.backends.engine import EngineBackend
from gapless.frontend.backends.openai import OpenAI
from gapless.frontend.backends.wrap import as_backend


def test_an_engine_a_url_and_a_backend() -> None:
    with Engine("toy") as engine:
        backend = as_backend(engine)
        assert isinstance(backend, EngineBackend)
        params = {"max_new_tokens": 1}
        (answer,) = asyncio.run(backend.generate(Prompt("a"), params, Hint()))
        assert answer.text == engine.generate("a", params)["text"]
        assert as_backend(backend) is backend
    endpoint = as_backend("http://127.0.0.1:30000")
    assert isinstance(endpoint, RuntimeEndpoint)
    assert endpoint.url == "http://127.0.0.1:30000"
    assert isinstance(given := OpenAI("model"), OpenAI)
    assert as_backend(given) is given


@pytest.mark.parametrize("given", [None, 5, object(), Engine])
def test_anything_else_is_named(given: object) -> None:
    with pytest.raises(TypeError, match=r"a backend is .* not (NoneType|int|object|type)"):
        as_backend(given)
    with pytest.raises(ValueError, match="http"):
        as_backend("toy")


def test_the_client_of_a_server_loads_neither_the_engine_nor_torch() -> None:
    code = (
        "import sys; from gapless.frontend.backends.wrap import as_backend; as_backend('http://localhost:1');"
        "print([name for name in ('torch', 'numpy', 'zmq', 'gapless.runtime.engine') if name in sys.modules])"
    )
    run = subprocess.run(
        [sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert run.stdout == "[]\n"
