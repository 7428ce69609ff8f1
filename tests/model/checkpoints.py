"""Tiny random checkpoints, one a feature, made with transformers."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import Tensor

SHAPE: dict[str, Any] = {
    "vocab_size": 199,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
}
LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0}
DYNAMIC_ROPE = {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 2.0}
GEMMA = {"head_dim": 32, "sliding_window": 8, "query_pre_attn_scalar": 24, "num_hidden_layers": 7}

# Case to (config class, what it sets beyond SHAPE).
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama2": ("LlamaConfig", {}),
    "llama2 biases": ("LlamaConfig", {"attention_bias": True, "mlp_bias": True}),
    "llama2 linear": ("LlamaConfig", {"rope_parameters": LINEAR_ROPE}),
    "llama2 dynamic": ("LlamaConfig", {"rope_parameters": DYNAMIC_ROPE}),
    "llama2 yarn": ("LlamaConfig", {"rope_parameters": YARN_ROPE}),
    "llama3": ("LlamaConfig", {"rope_parameters": LLAMA3_ROPE, "tie_word_embeddings": True}),
    "mistral": ("MistralConfig", {"sliding_window": 8}),
    "qwen2": ("Qwen2Config", {}),
    "qwen2 windows": (
        "Qwen2Config",
        {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3Config", {"head_dim": 32}),
    "gemma3": ("Gemma3TextConfig", GEMMA),
    "gemma3 soft cap": ("Gemma3TextConfig", GEMMA | {"final_logit_softcapping": 2.0}),
}


def make_model(case: str) -> transformers.PreTrainedModel:
    """In float32 with every parameter random, norms and biases included, so that logits are of order one."""
    class_name, settings = CASES[case]
    config = getattr(transformers, class_name)(**SHAPE | settings, attn_implementation="eager")
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim == 1:
                parameter += 0.3 * noise
            else:
                parameter.copy_(noise * parameter.shape[-1] ** -0.5)
    return model


def make_prompts() -> dict[str, list[int]]:
    """Longer than two sliding windows of eight."""
    generator = torch.Generator().manual_seed(2)
    return {
        name: torch.randint(1, SHAPE["vocab_size"], (length,), generator=generator).tolist()
        for name, length in (("a", 30), ("b", 24))
    }


def expected_logits(model: transformers.PreTrainedModel, prompts: dict[str, list[int]]) -> dict[str, Tensor]:
    with torch.inference_mode():
        return {name: model(torch.tensor([ids])).logits[0] for name, ids in prompts.items()}
