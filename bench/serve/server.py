"""The server that is measured: what it says of itself, its cache, its load."""

from __future__ import annotations

import asyncio
import re
import time
from dataclasses import dataclass, field
from typing import Any

import orjson

from gapless.bench.serve.dialects import Asking, Whole, is_messages
from gapless.runtime.core.errors import ConfigError, GaplessError
from gapless.runtime.core.http_client import HttpClient, Response

PROBE_SECONDS = 10.0
FLUSH_SECONDS = 60.0
_VLLM_GAUGES = {"running": b"vllm:num_requests_running", "waiting": b"vllm:num_requests_waiting"}


class ServerError(GaplessError):
    """The server does not answer, or not as one of its kind."""

    code = "server_error"


@dataclass(frozen=True, slots=True)
class Facts:
    """`info` is what the server says of itself, as it says it; `model_path` where its tokenizer may be found."""

    model: str
    model_path: str
    vocab_size: int | None
    incremental: bool
    info: dict[str, Any] = field(default_factory=dict)

    def public(self) -> dict[str, Any]:
        """What a report keeps: the plain values."""
        return {
            name: value
            for name, value in self.info.items()
            if isinstance(value, str | int | float | bool | None)
        }


async def probe(client: HttpClient, backend: str, model: str | None) -> Facts:
    """Raises ServerError where nothing answers, or the model is not to be found."""
    native = backend in ("gapless", "sglang", "router")
    try:
        names = await _json(client, "/v1/models")
        about = await _first(client, "/model_info", "/get_model_info") if native else {}
        info = (
            await _first(client, "/server_info", "/get_server_info")
            if native
            else await _json(client, "/version")
        )
    except (OSError, TimeoutError) as error:
        raise ServerError(f"the server does not answer: {error}") from error
    cards = names.get("data")
    cards = [card for card in cards if isinstance(card, dict)] if isinstance(cards, list) else []
    served = [str(card["id"]) for card in cards if card.get("id")]
    if not (served or about or model):
        raise ServerError("the server does not say which model it has: give --model")
    if model and served and model not in served:
        raise ConfigError(f"--model {model}: the server has {', '.join(served)}", param="model")
    vocab_size = about.get("vocab_size")
    return Facts(
        model=model or (served[0] if served else str(about.get("model_path", "default"))),
        model_path=str(
            about.get("tokenizer_path")
            or about.get("model_path")
            or (cards[0].get("root") if cards else "")
            or ""
        ),
        vocab_size=vocab_size if isinstance(vocab_size, int) and vocab_size > 0 else None,
        incremental=bool(info.get("incremental_streaming_output") or info.get("stream_output")),
        info=about | info,
    )


async def check_answers(client: HttpClient, asking: Asking, like: Whole) -> None:
    """One small request to the route of prompts like `like`, so that a wrong model, key or address is known before.

    Raises ServerError.
    """
    prompt: Whole = [{"role": "user", "content": "Hello"}] if is_messages(like) else "Hello"
    try:
        response = await client.request(
            "POST", asking.path(prompt), asking.body(prompt, 1), timeout=PROBE_SECONDS * 6
        )
    except (OSError, TimeoutError) as error:
        raise ServerError(f"the server does not answer a request: {error}") from error
    if response.status >= 300:
        raise ServerError(f"the server refuses a request: {refusal(response)}")


async def flush(client: HttpClient, backend: str) -> None:
    """Empties the server's prefix cache, once it is at rest; raises ServerError where that is refused."""
    path = {"vllm": "/reset_prefix_cache"}.get(backend, "/flush_cache")
    if backend == "openai":
        raise ServerError("--flush-cache: OpenAI's API has no way to empty the cache")
    try:
        response = await client.request(
            "POST", f"{path}?timeout={FLUSH_SECONDS:.0f}", timeout=FLUSH_SECONDS + PROBE_SECONDS
        )
    except (OSError, TimeoutError) as error:
        raise ServerError(f"--flush-cache: {error}") from error
    if response.status >= 300:
        raise ServerError(f"--flush-cache: {path}: {refusal(response)}")


class LoadSampler:
    """Asks the server once a second how many requests run and wait, where it has a route for that."""

    def __init__(self, client: HttpClient, backend: str, started: float, interval: float = 1.0) -> None:
        self._client, self._backend, self._started, self._interval = client, backend, started, interval
        self.samples: list[dict[str, float]] = []

    async def run(self) -> None:
        """Until cancelled, or the server turns out not to say."""
        while True:
            at = time.perf_counter() - self._started
            try:
                load = await self._load()
            except (OSError, TimeoutError, ValueError, KeyError, TypeError, IndexError):
                return  # a measured server need not have the route; the report shows no samples then
            self.samples.append({"at": at} | load)
            await asyncio.sleep(self._interval)

    async def _load(self) -> dict[str, float]:
        if self._backend == "vllm":
            text = (await self._get("/metrics")).body
            return {name: _gauge(text, gauge) for name, gauge in _VLLM_GAUGES.items()}
        load = orjson.loads((await self._get("/get_load")).body)[0]
        waiting = load["num_waiting_reqs"]
        return {"running": load["num_reqs"] - waiting, "waiting": waiting, "used_tokens": load["num_tokens"]}

    async def _get(self, path: str) -> Response:
        response = await self._client.request("GET", path, timeout=PROBE_SECONDS)
        if response.status != 200:
            raise ValueError(f"{path}: {response.status}")
        return response


def refusal(response: Response) -> str:
    """The status and the server's own words, shortened."""
    try:
        value = orjson.loads(response.body)
        error = value.get("error", value) if isinstance(value, dict) else value
        words = error.get("message", error) if isinstance(error, dict) else error
    except orjson.JSONDecodeError:
        words = response.body.decode(errors="replace").strip()
    elsewhere = f", it is at {response.headers['location']}" if "location" in response.headers else ""
    return f"{response.status} {str(words)[:300]}{elsewhere}"


def _gauge(text: bytes, name: bytes) -> float:
    found = re.findall(rb"^" + re.escape(name) + rb"(?:\{[^}]*\})? (\S+)$", text, re.MULTILINE)
    return sum(float(value) for value in found) if found else _missing(name)


def _missing(name: bytes) -> float:
    raise KeyError(name.decode())


async def _first(client: HttpClient, *paths: str) -> dict[str, Any]:
    for path in paths:
        if value := await _json(client, path):
            return value
    return {}


async def _json(client: HttpClient, path: str) -> dict[str, Any]:
    """The route's object; empty where the server has no such route. Raises ServerError for a redirect, 401 and 403."""
    response = await client.request("GET", path, timeout=PROBE_SECONDS)
    if response.status in (401, 403) or "location" in response.headers:
        raise ServerError(f"{path}: {refusal(response)}")
    if response.status != 200:
        return {}
    try:
        value = orjson.loads(response.body)
    except orjson.JSONDecodeError:
        return {}
    return value if isinstance(value, dict) else {}
