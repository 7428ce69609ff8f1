"""From a model's files to a decoder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from gapless.kernels.ops import Ops
from gapless.runtime.core.errors import ModelLoadError
from gapless.runtime.core.model_path import ModelSource
from gapless.runtime.model.config import ModelConfig
from gapless.runtime.model.decoder import Decoder
from gapless.runtime.model.gguf_weights import gguf_weights
from gapless.runtime.model.interface import Model
from gapless.runtime.model.loader_names import hf_name, tensor_shapes
from gapless.runtime.model.loader_safetensors import StoredTensor, read_checkpoint

CPU = torch.device("cpu")
# Before "embed_tokens.weight" stands one of these: a causal model, Gemma 3 with vision (two spellings), a bare model.
_HF_PREFIXES = ("model.", "language_model.model.", "model.language_model.", "")


def load_model(
    source: ModelSource,
    dtype: torch.dtype,
    ops: Ops,
    progress: Callable[[str], None],
    device: torch.device = CPU,
) -> Model:
    """Loads an "hf" or "gguf" source in `dtype` on `device`; `progress` is told in words what is being done.

    Raises ModelLoadError naming the file, and the tensor where one is missing, cut or of another shape.
    """
    progress(f"reading {source.path}")
    config = ModelConfig.from_source(source)
    if source.kind == "gguf":
        weights = gguf_weights(source.path, config, dtype, progress)
    else:
        weights = hf_weights(source.path, config)
    progress("packing weights")
    return Decoder(config, weights, dtype, ops, device)


def hf_weights(directory: Path, config: ModelConfig) -> dict[str, StoredTensor]:
    """The decoder's tensors by name, mapped from the directory's safetensors; other tensors there are ignored."""
    stored = read_checkpoint(directory)
    prefix = next((p for p in _HF_PREFIXES if f"{p}embed_tokens.weight" in stored), "model.")
    head_prefix = "language_model." if prefix == "language_model.model." else ""
    weights = {}
    for name, shape in tensor_shapes(config).items():
        file_name = (head_prefix if name == "output.weight" else prefix) + hf_name(name, config)
        if file_name not in stored:
            raise ModelLoadError(f"{directory}: tensor {file_name} is missing")
        weights[name] = stored[file_name]
        weights[name].check(shape)
    return weights
