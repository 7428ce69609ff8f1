"""Our logits are transformers', in float32, however a prompt is cut into steps and laid out in pages."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from gapless.kernels.ops import Ops
from gapless.runtime.core.model_path import ModelSource
from gapless.runtime.model.interface import Model
from gapless.runtime.model.loader import load_model

from .checkpoints import CASES, expected_logits, make_model, make_prompts
from .paged import PagedRun

SCHEDULES = {
    "whole prompt": [{"a": 30}],
    "uneven chunks": [{"a": 5}, {"a": 1}, {"a": 13}, {"a": 11}],
    "token by token": [{"a": 5}] + [{"a": 1}] * 10 + [{"a": 15}],
    "two requests in a step": [
        {"a": 9},
        {"a": 1, "b": 12},
        {"b": 1, "a": 1},
        {"a": 18, "b": 10},
        {"b": 1, "a": 1},
    ],
}


@dataclass(frozen=True)
class Checkpoint:
    directory: Path
    prompts: dict[str, list[int]]
    logits: dict[str, Tensor]


@pytest.fixture(scope="module", params=CASES)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    model, prompts = make_model(request.param), make_prompts()
    directory = tmp_path_factory.mktemp("model")
    model.save_pretrained(directory)
    return Checkpoint(directory, prompts, expected_logits(model, prompts))


@pytest.fixture(scope="module")
def model(checkpoint: Checkpoint, ops: Ops) -> Model:
    return load_model(ModelSource("hf", checkpoint.directory), torch.float32, ops, lambda _: None)


@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_logits_are_transformers(
    checkpoint: Checkpoint, model: Model, page_size: int, schedule: list[dict[str, int]]
) -> None:
    run = PagedRun(model, checkpoint.prompts, page_size)
    for counts in schedule:
        begin = dict(run.done)
        for name, logits in run.step(counts).items():
            want = checkpoint.logits[name][begin[name] : run.done[name]]
            torch.testing.assert_close(logits, want, atol=1e-4, rtol=0)


@pytest.mark.parametrize("case", ["llama2", "qwen3", "gemma3"])
def test_bfloat16_is_near(tmp_path: Path, ops: Ops, case: str) -> None:
    origin, prompts = make_model(case), make_prompts()
    origin.save_pretrained(tmp_path)
    model = load_model(ModelSource("hf", tmp_path), torch.bfloat16, ops, lambda _: None)
    got = PagedRun(model, prompts, page_size=4).step({"a": 30})["a"]
    assert got.dtype == torch.bfloat16
    likeness = torch.cosine_similarity(got.float(), expected_logits(origin, prompts)["a"])
    assert likeness.min() > 0.998


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model.", ""])
def test_text_part_of_other_layouts(tmp_path: Path, ops: Ops, prefix: str) -> None:
    """Gemma 3 with vision nests its text model, older and newer files in different ways; a bare model has no prefix."""
    origin, prompts = make_model("gemma3"), make_prompts()
    origin.save_pretrained(tmp_path)
    config, weights = tmp_path / "config.json", tmp_path / "model.safetensors"
    config.write_text(json.dumps({"model_type": "gemma3", "text_config": json.loads(config.read_text())}))
    tensors = {prefix + name.removeprefix("model."): tensor for name, tensor in load_file(weights).items()}
    save_file(tensors, weights)
    model = load_model(ModelSource("hf", tmp_path), torch.float32, ops, lambda _: None)
    got = PagedRun(model, prompts, page_size=4).step({"a": 30})["a"]
    torch.testing.assert_close(got, expected_logits(origin, prompts)["a"], atol=1e-4, rtol=0)
