"""Writes a transformers model as a GGUF file, as llama.cpp's converter does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers

Array = np.ndarray[Any, np.dtype[np.float32]]


def write_gguf(
    path: Path, model: transformers.PreTrainedModel, arch: str, kind: str = "F32", drop: str | None = None
) -> None:
    """Matrices as `kind`, in which case `model` gets the rounded weights; `drop` leaves one tensor out."""
    config = model.config
    writer = gguf.GGUFWriter(path, arch)
    _write_metadata(writer, config)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[arch.upper()], config.num_hidden_layers)
    if config.rope_parameters.get("rope_type") == "llama3":
        writer.add_tensor("rope_freqs.weight", _llama3_divisors(model))
    for name, parameter in model.named_parameters():
        array = parameter.detach().numpy()
        if arch == "gemma3" and name.endswith("norm.weight"):
            array = array + 1
        for part, heads in (("q_proj", config.num_attention_heads), ("k_proj", config.num_key_value_heads)):
            if arch == "llama" and part in name:
                array = _interleave(array, heads)
        module, suffix = name.rsplit(".", 1)
        target = f"{names.get_name(module)}.{suffix}"
        if target != drop:
            quantisation = gguf.GGMLQuantizationType[kind if array.ndim == 2 else "F32"]
            writer.add_tensor(target, gguf.quants.quantize(array, quantisation), raw_dtype=quantisation)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def round_matrices(model: transformers.PreTrainedModel, kind: str) -> None:
    """Replaces each matrix by what is left of it after quantisation as `kind`."""
    quantisation = gguf.GGMLQuantizationType[kind]
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                packed = gguf.quants.quantize(parameter.numpy(), quantisation)
                parameter.copy_(torch.from_numpy(gguf.quants.dequantize(packed, quantisation)))


def _write_metadata(writer: gguf.GGUFWriter, config: Any) -> None:
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    if hasattr(config, "head_dim"):
        writer.add_key_length(config.head_dim)
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if getattr(config, "sliding_window", None) is not None:
        writer.add_sliding_window(config.sliding_window)
    writer.add_bos_token_id(2)
    writer.add_eos_token_id(1)
    writer.add_eot_token_id(106)


def _interleave(array: Array, heads: int) -> Array:
    """Rows (head, half, i) to rows (head, i, half): llama.cpp's order of query and key rows for llama."""
    return array.reshape(heads, 2, -1, *array.shape[1:]).swapaxes(1, 2).reshape(array.shape)


def _llama3_divisors(model: transformers.PreTrainedModel) -> Array:
    scaled = model.model.rotary_emb.inv_freq
    theta, dim = model.config.rope_parameters["rope_theta"], 2 * len(scaled)
    return (theta ** -(torch.arange(0, dim, 2) / dim) / scaled).numpy()
