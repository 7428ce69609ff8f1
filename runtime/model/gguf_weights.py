"""Weights of a GGUF file, dequantised once into the run's dtype and mapped from the cache after that."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gapless.runtime.core.cache import cached_dir, file_key
from gapless.runtime.core.errors import ModelLoadError
from gapless.runtime.core.gguf import GGML_TYPES, GGUFFile, TensorInfo, read_gguf
from gapless.runtime.model.config import ModelConfig
from gapless.runtime.model.gguf_dequantize import dequantize
from gapless.runtime.model.loader_names import tensor_shapes
from gapless.runtime.model.loader_safetensors import Layout, StoredTensor, read_safetensors, write_safetensors

_VERSION = 1  # of what the cache holds: raise it when a conversion changes
_FILE = "weights.safetensors"
_PIECE = 1 << 24  # weights that are dequantised at a time
_Rows = np.ndarray[Any, np.dtype[np.int64]]
_BLOCK_SIZE = {name: weights for name, weights, _ in GGML_TYPES.values()}


def gguf_weights(
    path: Path, config: ModelConfig, dtype: torch.dtype, progress: Callable[[str], None]
) -> dict[str, StoredTensor]:
    """The decoder's tensors by name: matrices in `dtype`, vectors in float32.

    Raises ModelLoadError naming the file and tensor where one is missing or has another shape.
    """
    gguf = read_gguf(path)
    shapes = tensor_shapes(config)
    for name, shape in shapes.items():
        _check(gguf, name, shape)
    layout: Layout = {
        name: (shape, dtype if len(shape) == 2 else torch.float32) for name, shape in shapes.items()
    }

    def build(directory: Path) -> None:
        write_safetensors(directory / _FILE, layout, _converted(gguf, config, layout, progress))

    directory = cached_dir("weights", file_key(_VERSION, dtype, path=path), build)
    return read_safetensors(directory / _FILE)


def _check(gguf: GGUFFile, name: str, shape: tuple[int, ...]) -> None:
    info = gguf.tensors.get(name)
    if info is None:
        raise ModelLoadError(f"{gguf.path}: tensor {name} is missing")
    if info.shape != shape:
        want, have = list(shape), list(info.shape)
        raise ModelLoadError(f"{gguf.path}: tensor {name} has shape {have}; its metadata asks for {want}")
    if math.prod(shape[1:]) % _BLOCK_SIZE[info.type_name]:
        raise ModelLoadError(f"{gguf.path}: rows of tensor {name} are no whole {info.type_name} blocks")


def _converted(
    gguf: GGUFFile, config: ModelConfig, layout: Layout, progress: Callable[[str], None]
) -> Iterator[Tensor]:
    """Each tensor of `layout`, in pieces of whole rows."""
    total, done, next_shown = sum(gguf.tensors[name].nbytes for name in layout), 0, 0
    for name, (_, dtype) in layout.items():
        if (percent := 100 * done // total) >= next_shown:
            progress(f"converting weights: {percent} %")
            next_shown = percent + 10
        info = gguf.tensors[name]
        for piece in _pieces(gguf, info, _row_order(name, config)):
            yield piece.to(dtype)
        done += info.nbytes


def _pieces(gguf: GGUFFile, info: TensorInfo, order: _Rows | None) -> Iterator[Tensor]:
    rows, width = info.shape[0], math.prod(info.shape[1:])
    raw = gguf.data(info).reshape(rows, -1)
    step = max(1, _PIECE // width)
    for start in range(0, rows, step):
        part = raw[start : start + step] if order is None else raw[order[start : start + step]]
        # A copy: torch cannot hold read-only memory.
        yield dequantize(torch.from_numpy(np.array(part)), info.type_name, (len(part), width))


def _row_order(name: str, config: ModelConfig) -> _Rows | None:
    """Where to find each row of a tensor whose rows llama.cpp has reordered.

    For the llama architecture alone its converter interleaves the two halves of every query and key head, since its
    rotary embedding turns neighbours against each other; ours turns halves.
    """
    if config.architecture != "llama":
        return None
    heads = {"attn_q": config.num_heads, "attn_k": config.num_kv_heads}.get(name.split(".")[-2])
    if heads is None:
        return None
    return np.arange(heads * config.head_dim).reshape(heads, -1, 2).swapaxes(1, 2).reshape(-1)
