"""Where the benchmark's programs run: an engine in this process or a server, asked by programs and by plain calls.

Both count the prompt tokens of all requests, those that the programs' hints make included: the engine from its answers,
the server by its own counters.
"""

from __future__ import annotations

import asyncio
import json
import re
from dataclasses import dataclass
from typing import Any, Protocol

from gapless import Engine, RuntimeEndpoint
from gapless.frontend.loop import the_loop
from gapless.runtime.core.errors import InternalError
from gapless.runtime.core.http_client import HttpClient

Answer = dict[str, Any]
_COUNTER = r"^sglang:{}(?:\{{.*\}})? ([0-9.e+]+)$"


@dataclass(frozen=True, slots=True)
class Tokens:
    """Of prompts: all, and those that were found in the cache."""

    prompt: int = 0
    cached: int = 0

    def __add__(self, other: Tokens) -> Tokens:
        return Tokens(self.prompt + other.prompt, self.cached + other.cached)

    def __sub__(self, other: Tokens) -> Tokens:
        return Tokens(self.prompt - other.prompt, self.cached - other.cached)

    @property
    def computed(self) -> int:
        return self.prompt - self.cached


class Model(Protocol):
    """`backend` is for programs, `device` in words."""

    backend: Any
    device: str

    def call(self, text: str, params: dict[str, Any], **fields: Any) -> Answer:
        """One plain call of /generate with sampling parameters and other fields."""

    def count(self, text: str) -> int:
        """Its tokens."""

    def flush(self) -> None:
        """Forgets all cached prefixes."""

    def tokens(self) -> Tokens:
        """Of all requests so far."""

    def close(self) -> None: ...


class CountedEngine(Engine):
    """Programs call `async_generate`, plain calls `generate`."""

    total = Tokens()

    @property
    def device(self) -> str:
        ready = self._host._front.ready
        assert ready is not None
        return _device(ready.info)

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        return self._counted(super().generate(*args, **kwargs))

    async def async_generate(self, *args: Any, **kwargs: Any) -> Any:
        return self._counted(await super().async_generate(*args, **kwargs))

    def _counted(self, answers: Any) -> Any:
        for answer in answers if isinstance(answers, list) else [answers]:
            facts = answer["meta_info"]
            self.total += Tokens(facts["prompt_tokens"], facts["cached_tokens"])
        return answers


class InProcess:
    def __init__(self, **options: Any) -> None:
        self.backend = CountedEngine(**options)
        self.device = self.backend.device

    def call(self, text: str, params: dict[str, Any], **fields: Any) -> Answer:
        answer: Answer = self.backend.generate(text, params, **fields)
        return answer

    def count(self, text: str) -> int:
        return len(self.backend.tokenize(text))

    def flush(self) -> None:
        self.backend.flush_cache(timeout=60)

    def tokens(self) -> Tokens:
        return self.backend.total

    def close(self) -> None:
        self.backend.shutdown()


class Served:
    """A running server. What others ask of it is counted, too."""

    def __init__(self, url: str, api_key: str = "") -> None:
        """Raises InternalError where no server is ready there."""
        self.backend = RuntimeEndpoint(url, api_key=api_key or None)
        self.url = url.rstrip("/")
        headers = {"authorization": f"Bearer {api_key}"} if api_key else None
        self._client = HttpClient(self.url, headers=headers)
        self._runner = asyncio.Runner()
        self.info: dict[str, Any] = json.loads(self._ask("GET", "/server_info"))
        if "device" not in self.info:
            raise InternalError(f"{self.url} is not ready: {self.info.get('status')}")
        self.device = _device(self.info)

    def call(self, text: str, params: dict[str, Any], **fields: Any) -> Answer:
        body = {"text": text, "sampling_params": params, **fields}
        answer: Answer = json.loads(self._ask("POST", "/generate", body))
        return answer

    def count(self, text: str) -> int:
        return int(json.loads(self._ask("POST", "/tokenize", {"prompt": text}))["count"])

    def flush(self) -> None:
        self._ask("POST", "/flush_cache?timeout=60")

    def tokens(self) -> Tokens:
        text = self._ask("GET", "/metrics").decode()
        return Tokens(_counter(text, "prompt_tokens_total"), _counter(text, "cached_tokens_total"))

    def close(self) -> None:
        the_loop().wait(self.backend.close())
        self._runner.run(self._client.close())
        self._runner.close()

    def _ask(self, method: str, path: str, body: Any = None) -> bytes:
        """Raises InternalError where the server is not there or refuses."""
        data = b"" if body is None else json.dumps(body).encode()
        try:
            response = self._runner.run(self._client.request(method, path, data))
        except OSError as error:
            raise InternalError(f"{self.url}{path}: {error}") from error
        if response.status != 200:
            shown = response.body[:500].decode(errors="replace")
            raise InternalError(f"{self.url}{path} answered {response.status}: {shown}")
        return response.body


def _device(info: dict[str, Any]) -> str:
    return str(info["device"])


def _counter(text: str, name: str) -> int:
    found = re.search(_COUNTER.format(name), text, re.MULTILINE)
    if found is None:
        raise InternalError(f"the server's /metrics has no {name}")
    return int(float(found[1]))
