"""Routes that say what the server is and how it is."""

from __future__ import annotations

import reprlib
import time
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

import gapless
from gapless.runtime.core.errors import NotFoundError
from gapless.tokenizer_manager.api import Health, Info, Load, Model, ModelList
from gapless.tokenizer_manager.front import Front
from gapless.tokenizer_manager.responses import json_response
from gapless.tokenizer_manager.routes import RouteSpec


def routes(front: Front) -> list[RouteSpec]:
    info = _Info(front)
    return [
        RouteSpec(
            "/health",
            info.health,
            summary="Whether the engine's loop turned in the last two seconds",
            answer=Health,
        ),
        RouteSpec("/model_info", info.model_info, summary="The model", answer=Info),
        RouteSpec("/get_model_info", info.model_info, summary="Another name of /model_info", answer=Info),
        RouteSpec(
            "/server_info", info.server_info, summary="The options, and what the server does", answer=Info
        ),
        RouteSpec("/get_server_info", info.server_info, summary="Another name of /server_info", answer=Info),
        RouteSpec("/get_load", info.get_load, summary="For routers that go by load", answer=list[Load]),
        RouteSpec("/v1/models", info.models, summary="The models served: one", answer=ModelList),
        RouteSpec("/v1/models/{id:path}", info.model, summary="The model of this name", answer=Model),
        RouteSpec(
            "/metrics", info.metrics, summary="Counters and histograms for Prometheus", media="text/plain"
        ),
    ]


class ModelNotFoundError(NotFoundError):
    code = "model_not_found"


class _Info:
    def __init__(self, front: Front) -> None:
        self._front = front
        self._started = int(time.time())  # Unix time, seconds

    async def health(self, request: Request) -> Response:
        health = self._front.health()
        return json_response(health, 200 if health["status"] == "ok" else 503)

    async def model_info(self, request: Request) -> Response:
        config, ready = self._front.config, self._front.ready
        return json_response(
            {
                "model_path": config.model_path,
                "tokenizer_path": config.model_path,
                "served_model_name": config.model_name,
                "is_generation": True,
                "max_context_length": ready.context_length if ready else config.context_length,
                "vocab_size": ready.vocab_size if ready else 0,
            }
        )

    async def server_info(self, request: Request) -> Response:
        """The options, then what loading the model has decided in their place."""
        front = self._front
        info: dict[str, Any] = front.config.public() | {
            "served_model_name": front.config.model_name,
            "version": gapless.__version__,
            "status": front.health()["status"],
            "tp_size": 1,
            "dp_size": 1,
            "live_requests": len(front.registry),
            "running": front.heartbeat.running,
            "waiting": front.heartbeat.waiting,
            "used_tokens": front.heartbeat.used_tokens,
            "idle_violations": front.heartbeat.violations,
        }
        if (ready := front.ready) is not None:
            info |= ready.info | {
                "vocab_size": ready.vocab_size,
                "context_length": ready.context_length,
                "max_total_tokens": ready.max_total_tokens,
                "max_prompt_tokens": ready.max_prompt_tokens,
                "load_seconds": ready.load_seconds,
            }
        return json_response(info)

    async def get_load(self, request: Request) -> Response:
        heartbeat = self._front.heartbeat
        load = Load(0, len(self._front.registry), heartbeat.waiting, heartbeat.used_tokens)
        return json_response([msgspec.structs.asdict(load)])

    async def models(self, request: Request) -> Response:
        return json_response({"object": "list", "data": [self._model()]})

    async def model(self, request: Request) -> Response:
        name = request.path_params["id"]
        if name != self._front.config.model_name:
            raise ModelNotFoundError(f"the model {reprlib.repr(name)} does not exist here", param="model")
        return json_response(self._model())

    def _model(self) -> dict[str, Any]:
        config, ready = self._front.config, self._front.ready
        length = ready.context_length if ready else config.context_length
        model = Model(config.model_name, "model", self._started, "gapless", config.model_path, length)
        return msgspec.structs.asdict(model)

    async def metrics(self, request: Request) -> Response:
        front = self._front
        size = front.ready.max_total_tokens if front.ready else 0
        text = front.registry.metrics.text(front.config.model_name, front.heartbeat, size)
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")
