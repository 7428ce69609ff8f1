"""A GGUF header is read exactly; a damaged one is one clear error that names the file."""

import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gapless.runtime.core.errors import ModelLoadError
from gapless.runtime.core.gguf import read_gguf

WEIGHT = np.arange(64, dtype=np.float32).reshape(2, 32)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint32("llama.block_count", 2)
    writer.add_float32("llama.rope.freq_base", 10000.0)
    writer.add_bool("tokenizer.ggml.add_bos_token", True)
    writer.add_string("general.note", "größer")
    writer.add_array("tokenizer.ggml.tokens", ["a", "▁b", ""])
    writer.add_array("tokenizer.ggml.scores", [0.5, -1.5, 0.0])
    writer.add_tensor("token_embd.weight", WEIGHT)
    writer.add_tensor(
        "blk.0.q", WEIGHT.astype(np.uint8).reshape(-1)[:34].copy(), raw_dtype=gguf.GGMLQuantizationType.Q8_0
    )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_metadata_and_tensors_are_read(path: Path) -> None:
    file = read_gguf(path)
    assert file.metadata["general.architecture"] == "llama"
    assert file.metadata["llama.block_count"] == 2
    assert file.metadata["llama.rope.freq_base"] == 10000.0
    assert file.metadata["tokenizer.ggml.add_bos_token"] is True
    assert file.metadata["general.note"] == "größer"
    assert file.metadata["tokenizer.ggml.tokens"] == [b"a", "▁b".encode(), b""]
    assert file.metadata["tokenizer.ggml.scores"].tolist() == [0.5, -1.5, 0.0]
    weight = file.tensors["token_embd.weight"]
    assert (weight.shape, weight.type_name) == ((2, 32), "F32")
    assert np.array_equal(file.data(weight).view("<f4").reshape(2, 32), WEIGHT)
    quantised = file.tensors["blk.0.q"]
    assert (quantised.shape, quantised.type_name, quantised.nbytes) == ((32,), "Q8_0", 34)


def test_every_truncation_names_the_file(path: Path, tmp_path: Path) -> None:
    data, cut = path.read_bytes(), tmp_path / "cut.gguf"
    last_tensor_ends = max(t.offset + t.nbytes for t in read_gguf(path).tensors.values())
    for length in range(last_tensor_ends):
        cut.write_bytes(data[:length])
        with pytest.raises(ModelLoadError, match=r"cut\.gguf"):
            read_gguf(cut)


def test_a_cut_in_the_weights_names_the_tensor(path: Path, tmp_path: Path) -> None:
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(path.read_bytes()[: read_gguf(path).tensors["token_embd.weight"].offset + 1])
    with pytest.raises(ModelLoadError, match=r"cut\.gguf is truncated: tensor token_embd\.weight"):
        read_gguf(cut)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    changes=st.lists(
        st.tuples(st.integers(0, 10**6), st.binary(min_size=1, max_size=8)), min_size=1, max_size=3
    )
)
def test_a_damaged_header_is_read_or_refused(
    path: Path, tmp_path: Path, changes: list[tuple[int, bytes]]
) -> None:
    data, damaged = bytearray(path.read_bytes()), tmp_path / "damaged.gguf"
    for at, what in changes:
        at %= len(data)
        data[at : at + len(what)] = what
    damaged.write_bytes(data)
    try:
        read_gguf(damaged)
    except ModelLoadError as error:
        assert "damaged.gguf" in error.message


def header(*entries: bytes, tensors: bytes = b"", tensor_count: int = 0) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, tensor_count, len(entries)) + b"".join(entries) + tensors


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def tensor(shape: tuple[int, ...], kind: int) -> bytes:
    return text(b"w") + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, 0)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "empty"),
        (b"PK\x03\x04 and more", "not a GGUF file"),
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "version 1"),
        (header(text(b"general.alignment") + struct.pack("<II", 4, 0)), "alignment"),
        (header(text(b"general.alignment") + struct.pack("<I", 8) + text(b"x")), "alignment"),
        (header(text(b"x") + struct.pack("<IIQ", 9, 9, 1)), "unknown metadata type 9"),
        (header(text(b"x") + struct.pack("<IIQ", 9, 8, 2**62)), "truncated"),
        (header(text(b"x") + struct.pack("<IIQ", 9, 4, 2**62)), "truncated"),
        (header(text(b"\xff") + struct.pack("<IB", 0, 1)), "utf-8"),
        (header(tensors=tensor((4,), 99), tensor_count=1), "tensor w has ggml type 99"),
        (header(tensors=tensor((31,), 8), tensor_count=1), "not whole Q8_0 blocks"),
        (header(tensors=tensor((2**40, 2**40), 0), tensor_count=1), "tensor w"),
        (header(tensors=b"", tensor_count=2**60), "truncated"),
    ],
)
def test_each_kind_of_damage_is_named(data: bytes, message: str, tmp_path: Path) -> None:
    bad = tmp_path / "bad.gguf"
    bad.write_bytes(data)
    with pytest.raises(ModelLoadError, match=message) as caught:
        read_gguf(bad)
    assert "bad.gguf" in caught.value.message


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"gone\.gguf"):
        read_gguf(tmp_path / "gone.gguf")
