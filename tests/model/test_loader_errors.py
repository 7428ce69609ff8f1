"""Every damaged or unknown model gives one ModelLoadError that names the file, and the tensor where there is one."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from gapless.kernels.reference import ReferenceOps
from gapless.runtime.core.errors import ConfigError, ModelLoadError
from gapless.runtime.core.model_path import ModelSource
from gapless.runtime.model.loader import load_model

from .checkpoints import make_model
from .gguf_files import write_gguf

pytestmark = pytest.mark.usefixtures("own_cache")
Q_NAME = "model.layers.1.self_attn.q_proj.weight"


def load_error(kind: Any, path: Path) -> str:
    with pytest.raises(ModelLoadError) as caught:
        load_model(ModelSource(kind, path), torch.float32, ReferenceOps(), lambda _: None)
    return caught.value.message


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A llama in one safetensors file, in shards, and as GGUF."""
    root, model = tmp_path_factory.mktemp("made"), make_model("llama2")
    model.save_pretrained(root / "whole")
    model.save_pretrained(root / "shards", max_shard_size="100KB")
    write_gguf(root / "model.gguf", model, "llama")
    return root


@pytest.fixture
def whole(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made / "whole", tmp_path / "whole"))


@pytest.fixture
def shards(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made / "shards", tmp_path / "shards"))


def change_config(directory: Path, **values: object) -> Path:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))
    return path


def change_tensors(directory: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors")


def cut(path: Path, keep: float) -> None:
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * keep)])


def test_whole_and_sharded_load(whole: Path, shards: Path) -> None:
    for directory in (whole, shards):
        load_model(ModelSource("hf", directory), torch.float32, ReferenceOps(), lambda _: None)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            {"model_type": "mamba"},
            "unknown architecture 'mamba'; known are llama, mistral, qwen2, qwen3, gemma3",
        ),
        ({"model_type": None}, "unknown architecture None"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"hidden_size": "64"}, "hidden_size is '64', not of type int"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0; it must be positive"),
        ({"num_key_value_heads": 3}, "4 query heads cannot share 3 KV heads evenly"),
        ({"hidden_act": "relu"}, "unknown activation 'relu'"),
        ({"rope_parameters": {"rope_type": "spiral", "factor": 2.0}}, "unknown rope_type 'spiral'"),
        ({"rope_parameters": {"rope_type": "linear"}}, "factor is missing"),
        ({"rope_parameters": "linear"}, "rope_parameters is 'linear', not of type dict"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantised safetensors"),
        ({"eos_token_id": "</s>"}, "eos_token_id is '</s>', not an id or a list of ids"),
    ],
)
def test_bad_config(whole: Path, change: dict[str, Any], says: str) -> None:
    path = change_config(whole, **change)
    message = load_error("hf", whole)
    assert str(path) in message
    assert says in message


def test_config_that_is_no_json(whole: Path) -> None:
    (whole / "config.json").write_text("{")
    assert str(whole / "config.json") in load_error("hf", whole)


def test_no_weights(whole: Path) -> None:
    (whole / "model.safetensors").unlink()
    assert str(whole / "model.safetensors") in load_error("hf", whole)


def test_missing_shard(shards: Path) -> None:
    index = json.loads((shards / "model.safetensors.index.json").read_text())
    shard = shards / index["weight_map"][Q_NAME]
    shard.unlink()
    message = load_error("hf", shards)
    assert f"{shard} is missing" in message
    named = re.search(r"tensor (\S+)$", message)
    assert named is not None
    assert index["weight_map"][named[1]] == shard.name


def test_tensor_missing_in_its_shard(shards: Path) -> None:
    path = shards / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    shard = index["weight_map"]["model.norm.weight"]
    index["weight_map"]["model.extra.weight"] = shard
    path.write_text(json.dumps(index))
    assert f"{shards / shard}: tensor model.extra.weight is missing" in load_error("hf", shards)


def test_missing_tensor(whole: Path) -> None:
    change_tensors(whole, lambda tensors: tensors.pop(Q_NAME))
    assert load_error("hf", whole) == f"{whole}: tensor {Q_NAME} is missing"


def test_wrong_shape(whole: Path) -> None:
    change_tensors(whole, lambda tensors: tensors.update({Q_NAME: torch.zeros(64, 32)}))
    message = load_error("hf", whole)
    assert str(whole / "model.safetensors") in message
    assert f"tensor {Q_NAME} has shape [64, 32]; its config asks for [64, 64]" in message


def test_wrong_dtype(whole: Path) -> None:
    change_tensors(whole, lambda tensors: tensors.update({Q_NAME: torch.zeros(64, 64, dtype=torch.int8)}))
    message = load_error("hf", whole)
    assert str(whole / "model.safetensors") in message
    assert f"tensor {Q_NAME} has dtype I8" in message


def test_other_tensors_are_ignored(whole: Path) -> None:
    change_tensors(whole, lambda tensors: tensors.update({"vision.weight": torch.zeros(3, dtype=torch.int8)}))
    load_model(ModelSource("hf", whole), torch.float32, ReferenceOps(), lambda _: None)


def test_truncated_safetensors(whole: Path) -> None:
    path = whole / "model.safetensors"
    cut(path, 0.5)
    assert re.search(rf"^{path} is truncated: tensor \S+ ends at byte", load_error("hf", whole))


def test_truncated_gguf(made: Path, tmp_path: Path) -> None:
    path = Path(shutil.copy(made / "model.gguf", tmp_path))
    cut(path, 0.5)
    assert re.search(rf"^{path} is truncated: tensor \S+ ends at byte", load_error("gguf", path))


@given(keep=st.floats(0, 1, exclude_max=True))
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_cut_anywhere(made: Path, whole: Path, keep: float) -> None:
    weights, single = whole / "model.safetensors", whole / "model.gguf"
    shutil.copy(made / "whole" / "model.safetensors", weights)
    shutil.copy(made / "model.gguf", single)
    cut(weights, keep)
    cut(single, keep)
    assert str(weights) in load_error("hf", whole)
    assert str(single) in load_error("gguf", single)


def test_disk_that_fills_up(made: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fill_up(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("gapless.runtime.model.gguf_weights.write_safetensors", fill_up)
    with pytest.raises(ConfigError, match="No space left") as caught:
        load_model(ModelSource("gguf", made / "model.gguf"), torch.float32, ReferenceOps(), lambda _: None)
    assert str(own_cache) in caught.value.message


def test_gguf_with_unknown_architecture(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(path, make_model("llama2"), "llama")
    path.write_bytes(path.read_bytes().replace(b"llama", b"mamba"))
    message = load_error("gguf", path)
    assert message == f"{path}: unknown architecture 'mamba'; known are llama, qwen2, qwen3, gemma3"


@pytest.mark.parametrize("name", ["token_embd.weight", "blk.1.attn_q.weight"])
def test_gguf_with_a_missing_tensor(tmp_path: Path, name: str) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(path, make_model("llama2"), "llama", drop=name)
    assert load_error("gguf", path) == f"{path}: tensor {name} is missing"


def test_gguf_with_a_wrong_shape(tmp_path: Path) -> None:
    path, model = tmp_path / "model.gguf", make_model("llama2")
    model.config.intermediate_size = 80  # in the metadata alone
    write_gguf(path, model, "llama")
    message = load_error("gguf", path)
    assert (
        message == f"{path}: tensor blk.0.ffn_gate.weight has shape [96, 64]; its metadata asks for [80, 64]"
    )
