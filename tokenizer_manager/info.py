"""Routes that say what the server is and how it is."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

import gapless
from gapless.tokenizer_manager.front import Front
from gapless.tokenizer_manager.responses import json_response
from gapless.tokenizer_manager.routes import RouteSpec


def routes(front: Front) -> list[RouteSpec]:
    info = _Info(front)
    return [
        RouteSpec(
            "/health", info.health, summary="Whether the engine's loop turned within the last two seconds"
        ),
        RouteSpec("/model_info", info.model_info, summary="The model"),
        RouteSpec("/get_model_info", info.model_info, summary="Another name of /model_info"),
        RouteSpec("/server_info", info.server_info, summary="The options, and what the server does now"),
        RouteSpec("/get_server_info", info.server_info, summary="Another name of /server_info"),
    ]


class _Info:
    def __init__(self, front: Front) -> None:
        self._front = front

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
