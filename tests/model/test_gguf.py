"""A GGUF file gives the logits of the transformers model that it was written from."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from gapless.kernels.ops import Ops
from gapless.runtime.core.model_path import ModelSource
from gapless.runtime.model.config import ModelConfig
from gapless.runtime.model.loader import load_model

from .checkpoints import expected_logits, make_model, make_prompts
from .gguf_files import round_matrices, write_gguf
from .paged import PagedRun

pytestmark = pytest.mark.usefixtures("own_cache")


@pytest.mark.parametrize(
    ("case", "arch", "kind"),
    [
        ("llama2", "llama", "F32"),
        ("llama2", "llama", "Q8_0"),
        ("llama2 biases", "llama", "F32"),
        ("llama2 linear", "llama", "F32"),
        ("llama2 yarn", "llama", "F32"),
        ("llama3", "llama", "F16"),
        ("mistral", "llama", "Q5_0"),
        ("qwen2", "qwen2", "BF16"),
        ("qwen3", "qwen3", "Q4_1"),
        ("gemma3", "gemma3", "F32"),
        ("gemma3", "gemma3", "Q8_0"),
    ],
)
def test_logits_are_those_of_its_origin(tmp_path: Path, ops: Ops, case: str, arch: str, kind: str) -> None:
    origin, prompts = make_model(case), make_prompts()
    if arch == "gemma3":  # whose file does not say how scores are scaled
        for layer in origin.model.layers:
            layer.self_attn.scaling = origin.config.head_dim**-0.5
    round_matrices(origin, kind)
    write_gguf(tmp_path / "model.gguf", origin, arch, kind)
    model = load_model(ModelSource("gguf", tmp_path / "model.gguf"), torch.float32, ops, lambda _: None)
    got = PagedRun(model, prompts, page_size=4).step({name: len(ids) for name, ids in prompts.items()})
    for name, want in expected_logits(origin, prompts).items():
        torch.testing.assert_close(got[name], want, atol=1e-4, rtol=0)


def test_converts_once_per_file_and_dtype(tmp_path: Path, ops: Ops) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(path, make_model("llama2"), "llama")

    def conversions(dtype: torch.dtype) -> int:
        said: list[str] = []
        load_model(ModelSource("gguf", path), dtype, ops, said.append)
        return sum("converting" in line for line in said)

    assert conversions(torch.float32) > 0
    assert conversions(torch.float32) == 0
    assert conversions(torch.bfloat16) > 0
    write_gguf(path, make_model("llama2 biases"), "llama")
    assert conversions(torch.float32) > 0


def test_end_tokens_are_all_that_the_file_names(tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf", make_model("gemma3"), "gemma3")
    config = ModelConfig.from_source(ModelSource("gguf", tmp_path / "model.gguf"))
    assert (config.bos_token_id, config.eos_token_ids) == (2, {1, 106})
    assert config.windows == (8,) * 5 + (None, 8)
    assert [rope.theta for rope in config.ropes] == [1e4] * 5 + [1e6, 1e4]
