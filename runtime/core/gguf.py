"""Reads the header of a GGUF file: metadata and the list of tensors, without touching the weights.

Format: ggml's gguf.md. Arrays of numbers come as numpy arrays, arrays of strings as lists of bytes. Parsing
262,144 vocabulary strings takes a fraction of a second.
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gapless.runtime.core.errors import ModelLoadError

_NUMBERS: dict[int, np.dtype[Any]] = {
    0: np.dtype("<u1"), 1: np.dtype("<i1"), 2: np.dtype("<u2"), 3: np.dtype("<i2"), 4: np.dtype("<u4"),
    5: np.dtype("<i4"), 6: np.dtype("<f4"), 7: np.dtype("?"), 10: np.dtype("<u8"), 11: np.dtype("<i8"),
    12: np.dtype("<f8"),
}  # fmt: skip
_STRING, _ARRAY = 8, 9

# ggml type -> (name, weights per block, bytes per block), for the types that the loader can dequantise.
GGML_TYPES = {
    0: ("F32", 1, 4), 1: ("F16", 1, 2), 2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20), 6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24), 8: ("Q8_0", 32, 34), 12: ("Q4_K", 256, 144), 13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210), 30: ("BF16", 1, 2),
}  # fmt: skip


@dataclass(frozen=True)
class TensorInfo:
    """One tensor: `shape` in row-major order, `offset` and `nbytes` within the file."""

    name: str
    shape: tuple[int, ...]
    type_name: str
    offset: int
    nbytes: int


@dataclass(frozen=True)
class GGUFFile:
    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, TensorInfo]

    def data(self, tensor: TensorInfo) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """The tensor's raw bytes, mapped from the file (read only)."""
        mapped = np.memmap(self.path, mode="r", dtype=np.uint8)
        return mapped[tensor.offset : tensor.offset + tensor.nbytes]


def read_gguf(path: Path) -> GGUFFile:
    """Parses `path`; raises ModelLoadError naming the file, and the tensor where there is one."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Reader(path, data).parse()
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"cannot read GGUF file {path}: {error}") from error
    except (struct.error, IndexError, OverflowError) as error:
        raise ModelLoadError(f"GGUF file {path} is truncated in its header") from error


class _Reader:
    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path, self.buffer, self.position = path, data, 0

    def parse(self) -> GGUFFile:
        if self.buffer[:4] != b"GGUF":
            raise ModelLoadError(f"{self.path} is not a GGUF file (its first bytes are {self.buffer[:4]!r})")
        self.position = 4
        (version,) = self._unpack("<I")
        if version not in (2, 3):
            raise ModelLoadError(f"GGUF file {self.path} has version {version}; versions 2 and 3 are known")
        tensor_count, metadata_count = self._unpack("<QQ")
        metadata = {}
        for _ in range(metadata_count):
            key = self._string().decode()
            (kind,) = self._unpack("<I")
            metadata[key] = self._value(kind)
        headers = [self._tensor_header() for _ in range(tensor_count)]
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1:
            raise ModelLoadError(f"GGUF file {self.path} has general.alignment {alignment!r}")
        base = -(-self.position // alignment) * alignment
        return GGUFFile(self.path, metadata, {header[0]: self._tensor(base, *header) for header in headers})

    def _unpack(self, layout: str) -> tuple[Any, ...]:
        values = struct.unpack_from(layout, self.buffer, self.position)
        self.position += struct.calcsize(layout)
        return values

    def _string(self) -> bytes:
        (length,) = self._unpack("<Q")
        start, self.position = self.position, self.position + length
        if self.position > len(self.buffer):
            raise IndexError
        return self.buffer[start : self.position]

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string().decode(errors="replace")
        if kind == _ARRAY:
            item, count = self._unpack("<IQ")
            return self._strings(count) if item == _STRING else self._numbers(item, count)
        return self._numbers(kind, 1)[0].item()

    def _numbers(self, kind: int, count: int) -> Any:
        if kind not in _NUMBERS:
            raise ModelLoadError(f"GGUF file {self.path} uses unknown metadata type {kind}")
        dtype = _NUMBERS[kind]
        start, self.position = self.position, self.position + count * dtype.itemsize
        if self.position > len(self.buffer):
            raise IndexError
        return np.frombuffer(self.buffer[start : self.position], dtype)

    def _strings(self, count: int) -> list[bytes]:
        buffer, position, length_of = self.buffer, self.position, struct.Struct("<Q").unpack_from
        if count > len(buffer):
            raise IndexError
        strings = []
        for _ in range(count):
            start = position + 8
            position = start + length_of(buffer, position)[0]
            strings.append(buffer[start:position])
        if position > len(buffer):
            raise IndexError
        self.position = position
        return strings

    def _tensor_header(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string().decode()
        (dims,) = self._unpack("<I")
        shape = self._unpack(f"<{dims}Q")[::-1]
        kind, offset = self._unpack("<IQ")
        return name, shape, kind, offset

    def _tensor(self, base: int, name: str, shape: tuple[int, ...], kind: int, offset: int) -> TensorInfo:
        if kind not in GGML_TYPES:
            known = ", ".join(entry[0] for entry in GGML_TYPES.values())
            raise ModelLoadError(f"{self.path}: tensor {name} has ggml type {kind}; known are {known}")
        type_name, block, block_bytes = GGML_TYPES[kind]
        if shape[-1] % block:
            raise ModelLoadError(
                f"{self.path}: tensor {name} of shape {shape} is not whole {type_name} blocks"
            )
        nbytes = math.prod(shape) // block * block_bytes
        end = base + offset + nbytes
        if end > len(self.buffer):
            size = len(self.buffer)
            raise ModelLoadError(f"{self.path} is truncated: tensor {name} ends at byte {end} of {size}")
        return TensorInfo(name, shape, type_name, base + offset, nbytes)
