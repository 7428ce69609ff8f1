"""The demo model as transformers runs it, from the weights that we dequantise: what "the right output" means."""

from __future__ import annotations

import torch
import transformers
from transformers.initialization import no_init_weights

from gapless.runtime.core.model_path import resolve_model_path
from gapless.runtime.model.config import ModelConfig
from gapless.runtime.model.gguf_weights import gguf_weights
from gapless.runtime.model.loader_names import hf_name


def transformers_demo() -> transformers.Gemma3ForCausalLM:
    """Gemma 3 270M in float32, on the CPU, in a few seconds; transformers' own GGUF reader takes minutes."""
    settings = transformers.Gemma3TextConfig(  # as Google publishes them
        vocab_size=262_144,
        hidden_size=640,
        intermediate_size=2048,
        num_hidden_layers=18,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=256,
        query_pre_attn_scalar=256,
        sliding_window=512,
        max_position_embeddings=32_768,
        rms_norm_eps=1e-6,
    )
    with no_init_weights():
        model = transformers.Gemma3ForCausalLM(settings).eval()
    source = resolve_model_path("demo")
    config = ModelConfig.from_source(source)
    weights = {}
    for name, stored in gguf_weights(source.path, config, torch.float32, lambda _: None).items():
        tensor = stored.load()
        weights["model." + hf_name(name, config)] = tensor - 1 if name.endswith("norm.weight") else tensor
    model.load_state_dict(weights | {"lm_head.weight": weights["model.embed_tokens.weight"]}, assign=True)
    model.tie_weights()
    return model
