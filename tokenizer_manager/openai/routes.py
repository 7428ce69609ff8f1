"""OpenAI's routes."""

from __future__ import annotations

from gapless.tokenizer_manager.front import Front
from gapless.tokenizer_manager.openai import chat, completions, embeddings
from gapless.tokenizer_manager.routes import RouteSpec


def routes(front: Front) -> list[RouteSpec]:
    return completions.routes(front) + chat.routes(front) + embeddings.routes(front)
