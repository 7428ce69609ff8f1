"""Random Llama checkpoints of any size, to measure and compare with where no weights can be had."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import Tensor

TINY: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
ONE_BILLION: dict[str, Any] = {  # the shape of Llama 3.2 1B
    "vocab_size": 128_256,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
}


def write_random_model(directory: Path, shape: dict[str, Any], dtype: torch.dtype, seed: int = 0) -> None:
    """Writes a Hugging Face directory: config.json and model.safetensors, without a tokenizer."""
    from gapless.runtime.core.model_path import ModelSource
    from gapless.runtime.model.config import ModelConfig
    from gapless.runtime.model.loader_names import hf_name, tensor_shapes
    from gapless.runtime.model.loader_safetensors import write_safetensors

    directory.mkdir(parents=True, exist_ok=True)
    settings = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "eos_token_id": 0} | shape
    (directory / "config.json").write_text(json.dumps(settings))
    config = ModelConfig.from_source(ModelSource("hf", directory))
    layout = {}
    for name, size in tensor_shapes(config).items():
        file_name = hf_name(name, config)
        layout[file_name if name == "output.weight" else f"model.{file_name}"] = (size, dtype)
    sizes = [size for size, _ in layout.values()]
    write_safetensors(directory / "model.safetensors", layout, _random_tensors(sizes, dtype, seed))


def _random_tensors(sizes: list[tuple[int, ...]], dtype: torch.dtype, seed: int) -> Iterator[Tensor]:
    """Matrices that keep the size of what they multiply, and vectors of ones."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    for size in sizes:
        if len(size) == 1:
            yield torch.ones(size, dtype=dtype)
        else:
            yield (torch.randn(size, generator=generator) * size[-1] ** -0.5).to(dtype)
