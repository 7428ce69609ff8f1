"""Embeddings of prompts, for POST /v1/embeddings and the offline engine.

The embedding of a prompt is the model's last hidden state, after the final norm, of the prompt's last token, in float32
and of length 1 (last-token pooling, as vLLM and SGLang have it for decoder-only models). Fewer dimensions are its first
ones, brought to length 1 again: of use with models that were trained for it (Matryoshka embeddings).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gapless.runtime.core.config import ServerConfig
from gapless.runtime.core.errors import AbortedError, RequestError
from gapless.runtime.core.messages import Ready
from gapless.tokenizer_manager.schema import GenerateRequest, parse_fields
from gapless.tokenizer_manager.states import RequestState

Embedding = NDArray[np.float32]


def parse_embed(fields: Mapping[str, Any], config: ServerConfig) -> GenerateRequest:
    """A request for embeddings from /generate's fields, those of sampling left out; raises RequestError."""
    request = parse_fields({**fields, "sampling_params": {"max_new_tokens": 0}}, config)
    prompts = [dataclasses.replace(prompt, embed=True) for prompt in request.prompts]
    return dataclasses.replace(request, prompts=prompts)


def check_dimensions(dimensions: int | None, ready: Ready | None) -> None:
    """Raises RequestError unless the model's embeddings have so many; None stands for all."""
    most = ready.hidden_size if ready else 0
    if dimensions is not None and not 1 <= dimensions <= most:
        raise RequestError(f"dimensions must be from 1 to {most}, got {dimensions}", param="dimensions")


def embedding(state: RequestState, dimensions: int | None) -> Embedding:
    """Of a request that has ended: [dimensions]. All 0 where the model says so. Raises AbortedError."""
    if not state.embedding:
        raise AbortedError(state.why or "aborted")
    values = np.frombuffer(state.embedding, "<f4")[:dimensions].astype(np.float64)
    return (values / (np.linalg.norm(values) or 1.0)).astype(np.float32)
