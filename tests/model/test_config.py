from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers

from gapless.runtime.core.model_path import ModelSource
from gapless.runtime.model.config import ModelConfig, Rope

from .checkpoints import CASES, GEMMA, SHAPE


def read(directory: Path, values: dict[str, Any]) -> ModelConfig:
    (directory / "config.json").write_text(json.dumps(values))
    return ModelConfig.from_source(ModelSource("hf", directory))


def as_saved(case: str) -> dict[str, Any]:
    class_name, settings = CASES[case]
    return dict(getattr(transformers, class_name)(**SHAPE | settings).to_dict())


@pytest.mark.parametrize("case", [case for case in CASES if not case.startswith("gemma3")])
@pytest.mark.parametrize("kind_key", ["rope_type", "type"])
def test_older_spelling_of_rope_means_the_same(tmp_path: Path, case: str, kind_key: str) -> None:
    new = as_saved(case)
    old = {key: value for key, value in new.items() if key != "rope_parameters"}
    scaling = dict(new["rope_parameters"])
    old["rope_theta"], kind = scaling.pop("rope_theta"), scaling.pop("rope_type")
    old["rope_scaling"] = None if kind == "default" else scaling | {kind_key: kind}
    assert read(tmp_path, old) == read(tmp_path, new)


def test_older_spelling_of_gemma_means_the_same(tmp_path: Path) -> None:
    new = as_saved("gemma3")
    old = {key: value for key, value in new.items() if key not in ("rope_parameters", "layer_types")}
    old |= {"rope_theta": 1e6, "rope_local_base_freq": 1e4, "sliding_window_pattern": 6}
    assert read(tmp_path, old) == read(tmp_path, new)


def test_gemma_with_vision_names_only_what_differs(tmp_path: Path) -> None:
    """The published file of the 4B model: most of the text model's numbers are transformers' defaults."""
    text = {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    }
    config = read(tmp_path, {"model_type": "gemma3", "eos_token_id": [1, 106], "text_config": text})
    assert (config.vocab_size, config.num_heads, config.num_kv_heads, config.head_dim) == (262_208, 8, 4, 256)
    assert (config.context_length, config.attention_scale, config.tied_head) == (131_072, 1 / 16, True)
    assert config.eos_token_ids == {1, 106}
    assert config.windows[:6] == (1024,) * 5 + (None,)
    assert config.ropes[:6] == (Rope(1e4),) * 5 + (Rope(1e6, "linear", 8.0),)


def test_gemma_with_its_own_layer_types(tmp_path: Path) -> None:
    kinds = ["full_attention", "sliding_attention"] * 3 + ["full_attention"]
    class_name, _ = CASES["gemma3"]
    values = getattr(transformers, class_name)(**SHAPE | GEMMA, layer_types=kinds).to_dict()
    config = read(tmp_path, values)
    assert config.windows == (None, 8) * 3 + (None,)
    assert [rope.theta for rope in config.ropes] == [1e6, 1e4] * 3 + [1e6]


def test_end_tokens_come_from_both_files(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 9]}')
    assert read(tmp_path, as_saved("llama2") | {"eos_token_id": 2}).eos_token_ids == {2, 7, 9}


def test_mistral_without_a_window(tmp_path: Path) -> None:
    assert read(tmp_path, as_saved("mistral") | {"sliding_window": None}).windows == (None,) * 3
