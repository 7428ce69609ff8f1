"""What a model's files say about its shape: one frozen record, whether read from config.json or from GGUF metadata."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

from gapless.runtime.core.errors import ModelLoadError
from gapless.runtime.core.gguf import GGUFFile, read_gguf
from gapless.runtime.core.model_path import ModelSource

T = TypeVar("T")
RopeKind = Literal["default", "linear", "llama3", "yarn"]
Activation = Literal["silu", "gelu_tanh"]

_HF_ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3", "gemma3")
_GGUF_ARCHITECTURES = ("llama", "qwen2", "qwen3", "gemma3")  # Mistral's files say llama
_ACTIVATIONS: dict[str, Activation] = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
_GEMMA_LOCAL_THETA = 10_000.0
_GEMMA_PATTERN = 6  # every sixth layer is global


@dataclass(frozen=True)
class Rope:
    """One rotary embedding. `divisors` (one a frequency) are what GGUF stores in place of llama3's parameters."""

    theta: float
    kind: RopeKind = "default"
    factor: float = 1.0
    original_context: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0
    divisors: tuple[float, ...] = ()


@dataclass(frozen=True)
class ModelConfig:
    """The shape of a decoder. `windows` and `ropes` have one entry a layer; a window of None is full attention."""

    architecture: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    context_length: int
    eos_token_ids: frozenset[int]
    bos_token_id: int | None
    windows: tuple[int | None, ...]
    ropes: tuple[Rope, ...] = ()
    intermediate_size: int = 0
    norm_eps: float = 1e-6
    activation: Activation = "silu"
    attention_scale: float = 1.0
    attention_soft_cap: float | None = None
    logit_soft_cap: float | None = None
    embedding_scale: float | None = None
    tied_head: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    sandwich_norms: bool = False  # attention's and MLP's outputs are normed too, before they are added
    norm_offset: float = 0.0  # what the file's norm weights lack: Gemma stores w - 1

    @classmethod
    def from_source(cls, source: ModelSource) -> ModelConfig:
        """Reads an "hf" or "gguf" source; raises ModelLoadError naming the file and what is wrong with it."""
        if source.kind == "hf":
            path = source.path / "config.json"
            config = _from_hf(path)
        elif source.kind == "gguf":
            path = source.path
            config = _from_gguf(read_gguf(path))
        else:
            raise ValueError(f"a model of kind {source.kind!r} has no config file")
        if config.num_heads % config.num_kv_heads:
            raise ModelLoadError(
                f"{path}: {config.num_heads} query heads cannot share {config.num_kv_heads} KV heads evenly"
            )
        if any(window is not None and window < 1 for window in config.windows):
            raise ModelLoadError(f"{path}: a sliding window must be positive")
        return config


class _Fields:
    """Values of one file, looked up by key; one that is missing or of another type raises ModelLoadError."""

    def __init__(self, path: Path, values: Mapping[str, Any], prefix: str = "") -> None:
        self.path, self.values, self.prefix = path, values, prefix

    def get(self, key: str, kind: type[T], default: T | None = None) -> T:
        value = self.find(key, kind)
        if value is None:
            value = default
        if value is None:
            raise ModelLoadError(f"{self.path}: {self.prefix}{key} is missing")
        return value

    def find(self, key: str, kind: type[T]) -> T | None:
        value = self.values.get(self.prefix + key)
        if kind is float and isinstance(value, int):
            value = float(value)
        if value is not None and not isinstance(value, kind):
            raise ModelLoadError(f"{self.path}: {self.prefix}{key} is {value!r}, not of type {kind.__name__}")
        return value

    def size(self, key: str, default: int | None = None) -> int:
        value = self.get(key, int, default)
        if value < 1:
            raise ModelLoadError(f"{self.path}: {self.prefix}{key} is {value}; it must be positive")
        return value


def _check_architecture(path: Path, name: Any, known: tuple[str, ...]) -> str:
    if name not in known:
        raise ModelLoadError(f"{path}: unknown architecture {name!r}; known are {', '.join(known)}")
    return str(name)


def _traits(architecture: str, hidden_size: int) -> dict[str, Any]:
    """What the architecture's name alone decides."""
    gemma = architecture == "gemma3"
    return {
        "qk_norm": architecture in ("qwen3", "gemma3"),
        "sandwich_norms": gemma,
        "embedding_scale": hidden_size**0.5 if gemma else None,
    }


# Hugging Face: config.json and generation_config.json

# What Gemma 3's published config files leave to transformers' defaults.
_GEMMA_DEFAULTS: dict[str, Any] = {
    "vocab_size": 262_208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131_072,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "rope_theta": 1_000_000.0,
    "tie_word_embeddings": True,
    "hidden_activation": "gelu_pytorch_tanh",
}


def _from_hf(path: Path) -> ModelConfig:
    outer = _read_json(path)
    model_type = outer.get("model_type")
    name = "gemma3" if model_type == "gemma3_text" else model_type
    architecture = _check_architecture(path, name, _HF_ARCHITECTURES)
    inner = outer.get("text_config") or {}
    values = outer | inner  # of a model with vision, the text part matters
    fields = _Fields(path, _GEMMA_DEFAULTS | values if architecture == "gemma3" else values)
    _refuse_unsupported(fields)
    hidden, heads = fields.size("hidden_size"), fields.size("num_attention_heads")
    head_dim = fields.size("head_dim", 128 if architecture == "qwen3" else hidden // heads)
    windows = _hf_windows(architecture, fields)
    attention_bias = fields.get("attention_bias", bool, False)
    return ModelConfig(
        architecture=architecture,
        vocab_size=fields.size("vocab_size"),
        hidden_size=hidden,
        num_layers=len(windows),
        num_heads=heads,
        num_kv_heads=fields.size("num_key_value_heads", heads),
        head_dim=head_dim,
        context_length=fields.size("max_position_embeddings"),
        eos_token_ids=_hf_eos(path, outer, inner),
        bos_token_id=fields.find("bos_token_id", int),
        windows=windows,
        ropes=_hf_ropes(architecture, fields, windows),
        intermediate_size=fields.size("intermediate_size"),
        norm_eps=fields.get("rms_norm_eps", float, 1e-6),
        activation=_hf_activation(fields),
        attention_scale=fields.get("query_pre_attn_scalar", float, float(head_dim)) ** -0.5,
        attention_soft_cap=fields.find("attn_logit_softcapping", float),
        logit_soft_cap=fields.find("final_logit_softcapping", float),
        tied_head=fields.get("tie_word_embeddings", bool, False),
        qkv_bias=attention_bias or architecture == "qwen2",
        output_bias=attention_bias,
        mlp_bias=fields.get("mlp_bias", bool, False),
        norm_offset=1.0 if architecture == "gemma3" else 0.0,
        **_traits(architecture, hidden),
    )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"cannot read {path}: {error}") from error
    if not isinstance(values, dict):
        raise ModelLoadError(f"{path} does not hold a JSON object")
    return values


def _refuse_unsupported(fields: _Fields) -> None:
    """Features that would load without complaint and compute something else."""
    if "quantization_config" in fields.values:
        raise ModelLoadError(f"{fields.path}: quantised safetensors (quantization_config) cannot be loaded")
    if fields.get("use_bidirectional_attention", bool, False):
        raise ModelLoadError(
            f"{fields.path}: use_bidirectional_attention: only causal decoders can be loaded"
        )


def _hf_eos(path: Path, *configs: Mapping[str, Any]) -> frozenset[int]:
    """Every id that one of `configs` or generation_config.json calls an end."""
    generation = path.with_name("generation_config.json")
    found: set[int] = set()
    for config in (*configs, _read_json(generation) if generation.is_file() else {}):
        value = config.get("eos_token_id")
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if not all(isinstance(token, int) for token in ids):
            raise ModelLoadError(f"{path}: eos_token_id is {value!r}, not an id or a list of ids")
        found.update(ids)
    return frozenset(found)


def _hf_activation(fields: _Fields) -> Activation:
    name = fields.find("hidden_activation", str) or fields.get("hidden_act", str, "silu")
    if name not in _ACTIVATIONS:
        known = ", ".join(_ACTIVATIONS)
        raise ModelLoadError(f"{fields.path}: unknown activation {name!r}; known are {known}")
    return _ACTIVATIONS[name]


def _hf_windows(architecture: str, fields: _Fields) -> tuple[int | None, ...]:
    layers = fields.size("num_hidden_layers")
    if architecture == "llama":
        return (None,) * layers
    window = fields.find("sliding_window", int)
    if architecture == "mistral":
        return (window if "sliding_window" in fields.values else 4096,) * layers
    if architecture != "gemma3" and not fields.get("use_sliding_window", bool, False):
        return (None,) * layers
    kinds = fields.find("layer_types", list)
    if kinds is None and architecture == "gemma3":
        return _every_nth_global(window, layers, fields.size("sliding_window_pattern", _GEMMA_PATTERN))
    if kinds is None:
        return tuple(window if i >= fields.get("max_window_layers", int, 28) else None for i in range(layers))
    if len(kinds) != layers or not set(kinds) <= {"sliding_attention", "full_attention"}:
        raise ModelLoadError(
            f"{fields.path}: layer_types does not describe {layers} attention layers: {kinds}"
        )
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _every_nth_global(window: int | None, layers: int, n: int) -> tuple[int | None, ...]:
    return tuple(window if (i + 1) % n else None for i in range(layers))


def _hf_ropes(architecture: str, fields: _Fields, windows: tuple[int | None, ...]) -> tuple[Rope, ...]:
    """`rope_parameters` (flat, or by layer type) as transformers 5 writes it, or rope_theta with rope_scaling."""
    parameters = fields.find("rope_parameters", dict) or fields.find("rope_scaling", dict) or {}
    theta = fields.get("rope_theta", float, 10_000.0)
    if architecture != "gemma3":
        return (_hf_rope(fields, parameters, theta),) * len(windows)
    by_type = _Fields(fields.path, parameters)
    local_theta = fields.get("rope_local_base_freq", float, _GEMMA_LOCAL_THETA)
    local_rope = _hf_rope(fields, by_type.find("sliding_attention", dict) or {}, local_theta)
    global_rope = _hf_rope(fields, by_type.find("full_attention", dict) or parameters, theta)
    return tuple(local_rope if window else global_rope for window in windows)


def _hf_rope(fields: _Fields, parameters: Mapping[str, Any], default_theta: float) -> Rope:
    rope = _Fields(fields.path, parameters)
    theta = rope.get("rope_theta", float, default_theta)
    kind = rope.find("rope_type", str) or rope.get("type", str, "default")
    # Dynamic NTK changes the base only past max_position_embeddings, which no request may exceed here.
    if kind in ("default", "dynamic"):
        return Rope(theta)
    factor = rope.get("factor", float)
    if kind == "linear":
        return Rope(theta, "linear", factor)
    original = rope.size("original_max_position_embeddings", fields.size("max_position_embeddings"))
    if kind == "llama3":
        low, high = rope.get("low_freq_factor", float), rope.get("high_freq_factor", float)
        return Rope(theta, "llama3", factor, original, low_freq_factor=low, high_freq_factor=high)
    if kind == "yarn":
        return Rope(
            theta,
            "yarn",
            factor,
            original,
            beta_fast=rope.get("beta_fast", float, 32.0),
            beta_slow=rope.get("beta_slow", float, 1.0),
            attention_factor=rope.get("attention_factor", float, _yarn_attention_factor(factor)),
        )
    raise ModelLoadError(
        f"{fields.path}: unknown rope_type {kind!r}; known are {', '.join(get_args(RopeKind))}, dynamic"
    )


def _yarn_attention_factor(factor: float) -> float:
    """What cosines and sines are multiplied by: YaRN, arXiv 2309.00071."""
    return 0.1 * math.log(factor) + 1.0 if factor > 1.0 else 1.0


# GGUF: metadata, and the list of tensors where metadata is silent


def _from_gguf(gguf: GGUFFile) -> ModelConfig:
    path, tensors = gguf.path, gguf.tensors
    architecture = _check_architecture(path, gguf.metadata.get("general.architecture"), _GGUF_ARCHITECTURES)
    if "token_embd.weight" not in tensors:
        raise ModelLoadError(f"{path}: tensor token_embd.weight is missing")
    fields = _Fields(path, gguf.metadata, f"{architecture}.")
    layers, hidden = fields.size("block_count"), fields.size("embedding_length")
    heads = fields.size("attention.head_count")
    head_dim = fields.size("attention.key_length", hidden // heads)
    tokens = _Fields(path, gguf.metadata, "tokenizer.ggml.")
    ends = [tokens.find(f"{name}_token_id", int) for name in ("eos", "eot", "eom")]
    gemma = architecture == "gemma3"
    windows = _gguf_windows(fields, layers, _GEMMA_PATTERN if gemma else None)
    return ModelConfig(
        architecture=architecture,
        vocab_size=tensors["token_embd.weight"].shape[0],
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=fields.size("attention.head_count_kv", heads),
        head_dim=head_dim,
        context_length=fields.size("context_length"),
        eos_token_ids=frozenset(token for token in ends if token is not None),
        bos_token_id=tokens.find("bos_token_id", int),
        windows=windows,
        ropes=_gguf_ropes(gguf, fields, head_dim, windows if gemma else (None,) * layers),
        intermediate_size=fields.size("feed_forward_length"),
        norm_eps=fields.get("attention.layer_norm_rms_epsilon", float),
        activation="gelu_tanh" if gemma else "silu",
        # Gemma 3 27B alone, known by its 62 layers, scales by its hidden size; metadata does not say so.
        attention_scale=(hidden / heads if gemma and layers == 62 else head_dim) ** -0.5,
        logit_soft_cap=fields.find("final_logit_softcapping", float),
        tied_head="output.weight" not in tensors,
        qkv_bias="blk.0.attn_q.bias" in tensors,
        output_bias="blk.0.attn_output.bias" in tensors,
        mlp_bias="blk.0.ffn_up.bias" in tensors,
        **_traits(architecture, hidden),
    )


def _gguf_windows(fields: _Fields, layers: int, pattern: int | None) -> tuple[int | None, ...]:
    window = fields.find("attention.sliding_window", int)
    return _every_nth_global(window, layers, pattern) if pattern else (window,) * layers


def _gguf_divisors(gguf: GGUFFile, head_dim: int) -> tuple[float, ...]:
    """llama3's scaling, which converters write as a tensor."""
    info = gguf.tensors.get("rope_freqs.weight")
    if info is None:
        return ()
    if (info.type_name, info.shape) != ("F32", (head_dim // 2,)):
        have = f"{info.type_name} of shape {list(info.shape)}"
        raise ModelLoadError(f"{gguf.path}: tensor {info.name} is {have}, not F32 of shape [{head_dim // 2}]")
    return tuple(gguf.data(info).view("<f4").tolist())


def _gguf_ropes(
    gguf: GGUFFile, fields: _Fields, head_dim: int, windows: tuple[int | None, ...]
) -> tuple[Rope, ...]:
    """Layers with a window get Gemma's local base."""
    theta = fields.get("rope.freq_base", float, 10_000.0)
    kind = fields.get("rope.scaling.type", str, "none")
    if kind == "none":
        rope = Rope(theta, divisors=_gguf_divisors(gguf, head_dim))
    elif kind == "linear":
        rope = Rope(theta, "linear", fields.get("rope.scaling.factor", float))
    elif kind == "yarn":
        factor = fields.get("rope.scaling.factor", float)
        original = fields.size("rope.scaling.original_context_length", fields.size("context_length"))
        rope = Rope(theta, "yarn", factor, original, attention_factor=_yarn_attention_factor(factor))
    else:
        raise ModelLoadError(f"{gguf.path}: unknown rope.scaling.type {kind!r}; known are none, linear, yarn")
    return tuple(Rope(_GEMMA_LOCAL_THETA) if window else rope for window in windows)
