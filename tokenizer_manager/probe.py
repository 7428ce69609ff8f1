"""GET /health_generate: one real token through the whole engine.

Probes share one request at a time, so that many of them cost no more than one. Its prompt is one token in a namespace
of the prefix cache of its own: there is at most one page of it, and nothing of it is ever found.
"""

from __future__ import annotations

import asyncio
import uuid

from starlette.requests import Request
from starlette.responses import Response

from gapless.runtime.core.errors import DeadlineError, UnavailableError
from gapless.runtime.core.sampling import SamplingParams
from gapless.tokenizer_manager.api import Health
from gapless.tokenizer_manager.front import Front
from gapless.tokenizer_manager.responses import json_response
from gapless.tokenizer_manager.routes import RouteSpec
from gapless.tokenizer_manager.schema import Prompt

PROBE_SECONDS = 20.0  # SGLang's
_CHECK_SECONDS = 0.5  # between two looks at the engine's heartbeat
_SPACE = "\0health_generate"
_PARAMS = SamplingParams(max_new_tokens=1, temperature=0.0, ignore_eos=True)


def routes(front: Front) -> list[RouteSpec]:
    return [
        RouteSpec(
            "/health_generate",
            _Probe(front).health_generate,
            summary="Whether the engine makes a token within 20 s",
            answer=Health,
        )
    ]


class _Probe:
    def __init__(self, front: Front) -> None:
        self._front = front
        self._running: asyncio.Task[bool] | None = None

    async def health_generate(self, request: Request) -> Response:
        """200 when a token came for this probe, or for anyone while it waited in a long queue; else 503 in time."""
        front, metrics = self._front, self._front.registry.metrics
        front.check_healthy()
        before = metrics.generation_tokens
        if self._running is None:
            self._running = asyncio.create_task(self._generate())
            self._running.add_done_callback(self._ended)
        running = self._running
        while not (await asyncio.wait({running}, timeout=_CHECK_SECONDS))[0]:
            front.check_healthy()
        if not running.result() and metrics.generation_tokens == before:
            raise UnavailableError(f"the engine made no token within {PROBE_SECONDS:g} s")
        return json_response({"status": "ok"})

    async def _generate(self) -> bool:
        """Whether a token came in time; it takes a place beyond the limit of the queue. Raises the engine's errors."""
        front, rid = self._front, uuid.uuid4().hex
        prompt = Prompt(None, [0], _PARAMS, rid, (rid,), cache_salt=_SPACE)
        call = front.registry.open([prompt], 0, PROBE_SECONDS, beyond_limit=True)
        try:
            await front.submit(call, [prompt])
            (state,) = await call.changed()
            error = state.error()
            if error is not None and not isinstance(error, DeadlineError):
                raise error
            return bool(state.ids)
        finally:
            front.registry.close(call)

    def _ended(self, task: asyncio.Task[bool]) -> None:
        self._running = None
        if not task.cancelled():
            task.exception()  # those who wait raise it; perhaps nobody does any more
