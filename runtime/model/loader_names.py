"""The tensors a decoder is made of: their names (llama.cpp's, used throughout), their shapes, Hugging Face's names."""

from __future__ import annotations

from gapless.runtime.model.config import ModelConfig

_HF_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "post_ffw_norm": "post_feedforward_layernorm",
}


def tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor that the decoder needs."""
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (config.vocab_size, config.hidden_size),
        "output_norm.weight": (config.hidden_size,),
    }
    if not config.tied_head:
        shapes["output.weight"] = (config.vocab_size, config.hidden_size)
    layer = _layer_shapes(config)
    for i in range(config.num_layers):
        shapes.update({f"blk.{i}.{name}": shape for name, shape in layer.items()})
    return shapes


def _layer_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    hidden, inner = config.hidden_size, config.intermediate_size
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    matrices = {
        "attn_q": (q, hidden),
        "attn_k": (kv, hidden),
        "attn_v": (kv, hidden),
        "attn_output": (hidden, q),
        "ffn_gate": (inner, hidden),
        "ffn_up": (inner, hidden),
        "ffn_down": (hidden, inner),
    }
    norms = {"attn_norm": hidden, "ffn_norm": hidden}
    if config.qk_norm:
        norms |= {"attn_q_norm": config.head_dim, "attn_k_norm": config.head_dim}
    if config.sandwich_norms:
        norms |= {"post_attention_norm": hidden, "post_ffw_norm": hidden}
    biased = ["attn_q", "attn_k", "attn_v"] if config.qkv_bias else []
    biased += ["attn_output"] if config.output_bias else []
    biased += ["ffn_gate", "ffn_up", "ffn_down"] if config.mlp_bias else []
    return {
        **{f"{name}.weight": shape for name, shape in matrices.items()},
        **{f"{name}.weight": (size,) for name, size in norms.items()},
        **{f"{name}.bias": matrices[name][:1] for name in biased},
    }


def hf_name(name: str, config: ModelConfig) -> str:
    """The name in a Hugging Face checkpoint, without the prefix that goes before all but `lm_head`."""
    top = {"token_embd": "embed_tokens", "output_norm": "norm", "output": "lm_head"}
    *layer, module, kind = name.split(".")
    if not layer:
        return f"{top[module]}.{kind}"
    # Where outputs are normed as well, "post attention" is the norm of attention's output.
    if module == "ffn_norm":
        module = "pre_feedforward_layernorm" if config.sandwich_norms else "post_attention_layernorm"
    elif module == "post_attention_norm":
        module = "post_attention_layernorm"
    else:
        module = _HF_LAYER_NAMES[module]
    return f"layers.{layer[1]}.{module}.{kind}"
