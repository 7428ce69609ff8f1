"""What the prefix cache saves: groups of prompts that begin alike, all sent at once, with the cache and without it.

The workload is SGLang's generated-shared-prefix. Two engines are loaded and work in turn, each time on new prompts.
Beside the ratio of their times stands that of the matrix products alone, if each prefix were computed once.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
from typing import Any

import numpy as np

from gapless.bench.offline import WARM_UP_TOKENS, generate
from gapless.bench.products import ProductTimes
from gapless.bench.profile import Profiler
from gapless.bench.report import add_report_options, envelope, progress, write_json
from gapless.runtime.core.config import ServerConfig
from gapless.runtime.core.options import add_options, config_from
from gapless.runtime.engine import Engine

SIZES = {
    "num_groups": (8, "groups, each with a prefix of its own"),
    "prompts_per_group": (8, "prompts with the same prefix"),
    "system_prompt_len": (512, "ids of a prefix"),
    "question_len": (32, "ids of a prompt after its prefix"),
    "output_len": (32, "ids of an answer"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    for name, (default, help) in SIZES.items():
        flag = f"--{name.replace('_', '-')}"
        parser.add_argument(
            flag, type=int, default=default, metavar="INT", help=f"{help} (default: {default})"
        )
    add_report_options(
        parser,
        seed_of="the prompts",
        repeat=3,
        repeat_help="runs with and without the cache, in turn; medians are reported",
    )
    add_options(parser)
    parser.set_defaults(log_level="warning")


def run(parsed: argparse.Namespace) -> int:
    for name in SIZES:
        if getattr(parsed, name) < 1:
            parsed.parser.error(f"--{name.replace('_', '-')}: must be at least 1")
    config = config_from(parsed.parser, parsed)
    if config.model_path == "toy":
        parsed.parser.error("--model-path toy: there are no matrix products to compare with")
    if config.disable_radix_cache:
        parsed.parser.error("--disable-radix-cache: this benchmark runs with the cache and without it")
    if not config.max_total_tokens:
        config = dataclasses.replace(config, max_total_tokens=pool_tokens(config, parsed))
    report = measure(config, parsed)
    print_report(report)
    if parsed.json:
        write_json(parsed.json, report)
    return 0


def measure(config: ServerConfig, parsed: argparse.Namespace) -> dict[str, Any]:
    """All figures of the report. The products are measured before and after each pair of runs."""
    sizes = {name: getattr(parsed, name) for name in (*SIZES, "repeat")}
    head = envelope("shared-prefix", config.public() | sizes, parsed.seed, model=config.model_path)
    with progress("loading the model three times: for the products alone, with the cache, without it"):
        profiler = Profiler(config)
        cached = Engine(**config.public())
        uncached = Engine(**dataclasses.replace(config, disable_radix_cache=True).public())
    random, vocabulary = np.random.default_rng(parsed.seed), profiler.info.vocab_size
    products = ProductTimes(profiler, parsed.num_groups * parsed.prompts_per_group)
    cached_runs: list[dict[str, float]] = []
    uncached_runs: list[dict[str, float]] = []
    with cached, uncached:
        with progress("warming up"):
            for engine in (cached, uncached):
                generate(engine, group_prompts(random, vocabulary, parsed), WARM_UP_TOKENS)
        products.measure()
        for turn in range(parsed.repeat):
            with progress(f"run {turn + 1} of {parsed.repeat}"):
                for engine, runs in ((cached, cached_runs), (uncached, uncached_runs)):
                    prompts = group_prompts(random, vocabulary, parsed)
                    runs.append(generate(engine, prompts, parsed.output_len))
            products.measure()
    return {
        **head,
        **sizes,
        "device": profiler.info.description,
        **figures(parsed, cached_runs, uncached_runs),
        "limit": products.run_seconds(prompt_tokens(parsed), parsed.output_len)
        / products.run_seconds(distinct_tokens(parsed), parsed.output_len),
    }


def figures(
    parsed: argparse.Namespace, cached: list[dict[str, float]], uncached: list[dict[str, float]]
) -> dict[str, Any]:
    """Seconds of both, their ratio, and the prompt tokens that were cached and computed (in the worst of the runs)."""
    durations = {
        name: [run["duration"] for run in runs] for name, runs in (("cached", cached), ("uncached", uncached))
    }
    medians = {name: statistics.median(seconds) for name, seconds in durations.items()}
    tokens = int(min(run["cached_tokens"] for run in cached))
    return {
        "durations": durations,
        "duration": medians,
        "speedup": medians["uncached"] / medians["cached"],
        "cached_tokens": tokens,
        "computed_prompt_tokens": prompt_tokens(parsed) - tokens,
        "prompt_tokens": prompt_tokens(parsed),
        "runs": [
            {"duration": {"cached": with_it, "uncached": without}, "speedup": without / with_it}
            for with_it, without in zip(durations["cached"], durations["uncached"], strict=True)
        ],
        "distinct_prompt_tokens": distinct_tokens(parsed),
    }


def group_prompts(
    random: np.random.Generator, vocabulary: int, parsed: argparse.Namespace
) -> list[list[int]]:
    """New prompts, shuffled."""
    groups, each = parsed.num_groups, parsed.prompts_per_group
    prefixes = random.integers(0, vocabulary, (groups, parsed.system_prompt_len))
    questions = random.integers(0, vocabulary, (groups * each, parsed.question_len))
    prompts: list[list[int]] = np.hstack([np.repeat(prefixes, each, axis=0), questions]).tolist()
    return [prompts[number] for number in random.permutation(len(prompts))]


def pool_tokens(config: ServerConfig, parsed: argparse.Namespace) -> int:
    """Room for two runs without any sharing; three models are loaded, so none may take half of the memory."""
    size = config.page_size
    pages = -(-(parsed.system_prompt_len + parsed.question_len + parsed.output_len) // size)
    return int(2 * parsed.num_groups * parsed.prompts_per_group * pages * size)


def prompt_tokens(parsed: argparse.Namespace) -> int:
    return int(
        parsed.num_groups * parsed.prompts_per_group * (parsed.system_prompt_len + parsed.question_len)
    )


def distinct_tokens(parsed: argparse.Namespace) -> int:
    """Prompt tokens that are left to compute if each prefix is computed once."""
    return int(
        parsed.num_groups * (parsed.system_prompt_len + parsed.prompts_per_group * parsed.question_len)
    )


def print_report(report: dict[str, Any]) -> None:
    groups, each = report["num_groups"], report["prompts_per_group"]
    lengths = (
        f"{report['system_prompt_len']} shared + {report['question_len']} own in / {report['output_len']} out"
    )
    print(
        f"{report['device']}\n{groups} groups x {each} prompts, {lengths}, greedy, {report['repeat']} run(s) each"
    )
    seconds = report["duration"]
    print(f"with the cache     {seconds['cached']:7.2f} s")
    print(f"without it         {seconds['uncached']:7.2f} s")
    print(f"faster by          {report['speedup']:7.2f} ; products alone {report['limit']:.2f}")
    print(
        f"prompt tokens      {report['prompt_tokens']:7} ; from the cache {report['cached_tokens']}, "
        f"computed {report['computed_prompt_tokens']}, distinct {report['distinct_prompt_tokens']}"
    )
