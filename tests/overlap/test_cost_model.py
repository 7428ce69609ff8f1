"""The roofline model: parameter counts that are published, times worked out by hand, pairs counted one by one."""

import dataclasses
import json
from types import SimpleNamespace

import numpy as np
import pytest

from gapless.overlap.cost_model import (
    LAUNCH_S,
    PROFILES,
    SHAPES,
    CostModel,
    DeviceProfile,
    move_costs,
    shape_named,
)
from gapless.runtime.core.config import ServerConfig
from gapless.runtime.core.errors import ConfigError
from gapless.runtime.core.plan import Copy, MoveCosts


def plan(new, kv_len, sampled=None, copies=()):
    """Rows with `new` tokens each that end at `kv_len`; `sampled` of them give logits, by default all."""
    return SimpleNamespace(
        ids=np.zeros(sum(new), np.int32),
        q_start=np.cumsum([0, *new]).astype(np.int32),
        kv_len=np.array(kv_len, np.int32),
        sample_rows=np.arange(len(new) if sampled is None else sampled),
        held_rows=np.arange(0),
        copies=copies,
    )


@pytest.mark.parametrize(
    ("name", "published", "tied"),
    [
        ("gemma-3-270m", 268_098_176, True),
        ("qwen3-0.6b", 596_049_920, True),
        ("llama-3-8b", 8_030_261_248, False),
        ("llama-3-70b", 70_553_706_496, False),
    ],
)
def test_a_preset_has_as_many_weights_as_the_published_model(name, published, tied):
    shape = SHAPES[name]
    weights = shape.body_weights + shape.head_weights * (1 if tied else 2)
    assert weights == pytest.approx(published, rel=1e-3)  # norms are not counted


def test_a_small_decode_step_takes_the_time_to_read_the_weights_and_the_kv():
    shape, device = SHAPES["llama-3-8b"], PROFILES["H100"]
    kv_bytes_of_a_token = 2 * 32 * 8 * 128 * 2
    read = 2 * (shape.body_weights + shape.head_weights) + kv_bytes_of_a_token * (1000 + 3000 + 2)
    seconds = CostModel(device, shape)(plan([1, 1], [1000, 3000]))
    assert seconds == pytest.approx(read / 3.35e12 + LAUNCH_S, rel=1e-12)
    assert 4.5e-3 < seconds < 4.8e-3


def test_a_long_prompt_takes_the_time_of_its_arithmetic():
    shape = SHAPES["llama-3-8b"]
    flops = 2 * shape.body_weights * 4096 + 2 * shape.head_weights
    flops += 32 * 4 * 32 * 128 * (4096 * 4097 // 2)
    seconds = CostModel(PROFILES["A100"], shape)(plan([4096], [4096]))
    assert seconds == pytest.approx(flops / 312e12 + LAUNCH_S, rel=1e-12)


def test_a_chunk_that_samples_nothing_reads_no_head():
    shape = SHAPES["qwen3-0.6b"]
    cost = CostModel(PROFILES["A100"], shape)
    saved = cost(plan([8], [8])) - cost(plan([8], [8], sampled=0))
    assert saved == pytest.approx(2 * shape.head_weights / 2.039e12, rel=1e-9)


@pytest.mark.parametrize("window", [None, 1, 3, 5, 64])
def test_pairs_and_positions_are_those_that_a_mask_would_count(window):
    new, end = [1, 4, 7, 1], [9, 4, 11, 1]
    pairs = positions = 0
    for count, length in zip(new, end, strict=True):
        seen = [range(max(0, q - (window or q + 1) + 1), q + 1) for q in range(length - count, length)]
        pairs += sum(len(keys) for keys in seen)
        positions += len(set().union(*seen)) + count
    shape = dataclasses.replace(SHAPES["llama-3-8b"], layers=((window, 2),))
    assert CostModel(PROFILES["H100"], shape)._attention(plan(new, end)) == (2 * pairs, 2 * positions)


def test_long_contexts_do_not_overflow():
    device = DeviceProfile(flops=1.0, bandwidth=float("inf"), link=1.0)
    seconds = CostModel(device, SHAPES["llama-3-70b"])(plan([100_000], [1_000_000]))
    assert seconds > 80 * 4 * 64 * 128 * 100_000 * 900_000


def test_a_step_without_rows_costs_a_launch():
    assert CostModel(PROFILES["H200"], SHAPES["llama-3-8b"])(plan([], [])) == LAUNCH_S


def copy(kind, count):
    return Copy(kind, np.arange(count, dtype=np.int32), np.arange(count, dtype=np.int32))


def test_copied_pages_take_the_time_of_the_link_or_of_the_memory_before_the_step():
    shape, page_bytes = SHAPES["llama-3-8b"], 32 * 2 * 32 * 8 * 128 * 2
    cost = CostModel(PROFILES["A100"], shape, page_size=32)
    copies = (copy("out", 3), copy("page", 5), copy("in", 4))
    seconds = page_bytes * (7 / 32e9 + 2 * 5 / 2.039e12)
    for new, kv_len in (([1, 1], [1000, 3000]), ([], [])):
        more = cost(plan(new, kv_len, copies=copies)) - cost(plan(new, kv_len))
        assert more == pytest.approx(seconds, rel=1e-9)


def test_what_moving_and_computing_a_token_cost():
    costs = move_costs(SHAPES["gemma-3-270m"], link=5e9, flops=1e11, value_bytes=4)
    assert costs == MoveCosts(
        kv_bytes=18 * 2 * 1 * 256 * 4,
        link=5e9,
        flops=1e11,
        token_flops=2 * 18 * (640 * 256 * (4 + 1 + 1 + 4) + 3 * 640 * 2048),
        pair_flops=18 * 4 * 4 * 256,
    )


def test_on_a_gpu_moving_a_prompt_is_cheaper_than_computing_it_again():
    for device in PROFILES.values():
        costs = move_costs(SHAPES["llama-3-8b"], device.link, device.flops)
        assert 2 * costs.kv_bytes / costs.link < costs.token_flops / costs.flops


def test_a_model_s_own_config_is_a_shape(tmp_path):
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151_936,
        "max_position_embeddings": 40_960,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "eos_token_id": 151_645,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert shape_named(str(tmp_path)) == SHAPES["qwen3-0.6b"]


@pytest.mark.parametrize("name", ["llama-9", "toy"])
def test_an_unknown_model_is_refused_with_the_known_ones(name):
    with pytest.raises(ConfigError, match=rf"--sim-model {name}: .*llama-3-8b"):
        shape_named(name)


def test_the_option_names_the_devices_there_are():
    (field,) = [field for field in dataclasses.fields(ServerConfig) if field.name == "sim_device"]
    assert field.metadata["choices"] == tuple(PROFILES)
