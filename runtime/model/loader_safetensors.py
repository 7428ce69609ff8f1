"""Tensors mapped from safetensors files, and a writer that needs only a piece of one at a time.

Format: eight bytes of length, a JSON header of that length, the tensors' bytes. The header is checked against the
file's size here, so that a truncated download fails when it is opened, by the name of the tensor that is cut.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gapless.runtime.core.errors import ModelLoadError

_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F64": torch.float64}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
Layout = Mapping[str, tuple[tuple[int, ...], torch.dtype]]  # name to shape and dtype


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file: `dtype` as safetensors spells it, `offset` and `nbytes` within the file."""

    path: Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int

    def load(self) -> Tensor:
        """Maps the tensor, copy on write: every call gives a view that may be changed without changing another."""
        raw = np.memmap(self.path, np.uint8, mode="c", offset=self.offset, shape=(self.nbytes,))
        return torch.from_numpy(raw).view(_DTYPES[self.dtype]).view(self.shape)

    def check(self, shape: tuple[int, ...]) -> None:
        """Raises ModelLoadError where the tensor is not what the model's config asks for."""
        if self.shape != shape:
            want, have = list(shape), list(self.shape)
            raise ModelLoadError(
                f"{self.path}: tensor {self.name} has shape {have}; its config asks for {want}"
            )
        if self.dtype not in _DTYPES:
            known = ", ".join(_DTYPES)
            raise ModelLoadError(f"{self.path}: tensor {self.name} has dtype {self.dtype}; known are {known}")
        if self.nbytes != math.prod(shape) * _DTYPES[self.dtype].itemsize:
            raise ModelLoadError(
                f"{self.path}: tensor {self.name} has {self.nbytes} bytes, which its shape contradicts"
            )


def read_safetensors(path: Path) -> dict[str, StoredTensor]:
    """The tensors of one file by name; raises ModelLoadError naming the file, and the tensor where there is one."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(0)
            start = 8 + int.from_bytes(file.read(8), "little")
            if start > size:
                raise ModelLoadError(f"{path} is truncated in its header, or not a safetensors file")
            header: dict[str, Any] = json.loads(file.read(start - 8))
        header.pop("__metadata__", None)
        return {name: _entry(path, name, fields, start, size) for name, fields in header.items()}
    except OSError as error:
        raise ModelLoadError(f"cannot read {path}: {error}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelLoadError(f"{path} is not a safetensors file: {error!r}") from error


def _entry(path: Path, name: str, fields: Mapping[str, Any], start: int, size: int) -> StoredTensor:
    first, last = fields["data_offsets"]
    if not 0 <= first <= last:
        raise ModelLoadError(f"{path}: tensor {name} has offsets {first} and {last}")
    if start + last > size:
        raise ModelLoadError(f"{path} is truncated: tensor {name} ends at byte {start + last} of {size}")
    return StoredTensor(path, name, fields["dtype"], tuple(fields["shape"]), start + first, last - first)


def read_checkpoint(directory: Path) -> dict[str, StoredTensor]:
    """The tensors of a Hugging Face directory, from its index of shards or its single file."""
    index = directory / "model.safetensors.index.json"
    if not index.is_file():
        return read_safetensors(directory / "model.safetensors")
    try:
        shard_of: dict[str, str] = json.loads(index.read_bytes())["weight_map"]
        shards = {name: directory / name for name in sorted(set(shard_of.values()))}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelLoadError(f"cannot read {index}: {error!r}") from error
    found: dict[str, StoredTensor] = {}
    for name, path in shards.items():
        here = [tensor for tensor, shard in shard_of.items() if shard == name]
        if not path.is_file():
            raise ModelLoadError(f"shard {path} is missing; it should hold tensor {here[0]}")
        stored = read_safetensors(path)
        for tensor in here:
            if tensor not in stored:
                raise ModelLoadError(f"{path}: tensor {tensor} is missing, though {index.name} puts it there")
            found[tensor] = stored[tensor]
    return found


def write_safetensors(path: Path, layout: Layout, pieces: Iterable[Tensor]) -> None:
    """Writes a file of `layout`; `pieces` are its tensors in that order, whole or cut into runs of rows."""
    header, position = {}, 0
    for name, (shape, dtype) in layout.items():
        end = position + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": _NAMES[dtype], "shape": shape, "data_offsets": (position, end)}
        position = end
    text = json.dumps(header).encode()
    text += b" " * (-(len(text) + 8) % 64)  # keeps the tensors aligned
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for piece in pieces:
            file.write(piece.contiguous().view(torch.uint8).numpy().data)
