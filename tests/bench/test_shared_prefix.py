"""`gapless bench shared-prefix`: its prompts, its counts and the form of its report, on the toy model. No timing."""

from types import SimpleNamespace

import numpy as np
import pytest

from gapless.bench import shared_prefix
from gapless.bench.products import ProductTimes
from gapless.bench.profile import CHUNK
from gapless.runtime.cli import main
from gapless.runtime.core.config import ServerConfig

SIZES = {
    "num_groups": 3,
    "prompts_per_group": 4,
    "system_prompt_len": 64,
    "question_len": 10,
    "output_len": 5,
    "repeat": 2,
    "seed": 1,
}


class StandIn:
    """A profiler whose products take 1 ms a row, and the head 10 ms."""

    def __init__(self, config=None):
        self.info = SimpleNamespace(vocab_size=512, description="stand-in")

    def product_seconds(self, rows, repeats):
        return rows / 1000, 0.01


def test_prompts_are_new_each_time_and_share_a_prefix_in_groups():
    random, parsed = np.random.default_rng(1), SimpleNamespace(**SIZES)
    first, second = (shared_prefix.group_prompts(random, 512, parsed) for _ in range(2))
    for prompts in (first, second):
        assert len(prompts) == len({tuple(prompt) for prompt in prompts}) == 12
        assert {len(prompt) for prompt in prompts} == {74}
        prefixes = [tuple(prompt[:64]) for prompt in prompts]
        assert sorted(map(prefixes.count, set(prefixes))) == [4, 4, 4]
        assert prefixes != sorted(prefixes, key=prefixes.index)  # shuffled
    assert not {tuple(prompt[:64]) for prompt in first} & {tuple(prompt[:64]) for prompt in second}


def test_with_the_cache_each_prefix_is_computed_once(monkeypatch):
    monkeypatch.setattr(shared_prefix, "Profiler", StandIn)
    config = ServerConfig(model_path="toy", log_level="warning")
    report = shared_prefix.measure(config, SimpleNamespace(**SIZES))
    assert report["prompt_tokens"] == 12 * 74
    assert report["distinct_prompt_tokens"] == 3 * 64 + 12 * 10
    assert report["cached_tokens"] == 3 * 3 * 64
    assert report["computed_prompt_tokens"] == report["distinct_prompt_tokens"]
    assert [len(report["durations"][name]) for name in ("cached", "uncached")] == [2, 2]
    seconds = report["duration"]
    assert report["speedup"] == seconds["uncached"] / seconds["cached"] > 0
    decode = 5 * (0.012 + 0.01)
    assert report["limit"] == pytest.approx((decode + 12 * 74 / 1000) / (decode + 312 / 1000))


def test_the_limit_comes_from_medians():
    samples = iter([(4.0, 1.0), (8.0, 1.0), (2.0, 3.0), (8.0, 1.0), (3.0, 2.0), (16.0, 1.0)])
    times = ProductTimes(SimpleNamespace(product_seconds=lambda rows, repeats: next(samples)), 2)
    for _ in range(3):
        times.measure()
    assert times.medians() == {2: (3.0, 2.0), CHUNK: (8.0, 1.0)}
    assert times.run_seconds(CHUNK // 2, 10) == 10 * 5.0 + 4.0


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--question-len=0", "--question-len: must be at least 1"),
        ("--disable-radix-cache", "runs with the cache and without it"),
        ("--model-path=toy", "no matrix products"),
    ],
)
def test_a_wrong_option_is_named(option, message, capsys):
    with pytest.raises(SystemExit) as exit:
        main(["bench", "shared-prefix", option])
    assert exit.value.code == 2 and message in capsys.readouterr().err
