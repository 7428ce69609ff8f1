"""Throughput of the engine without HTTP: random prompts, all sent at once, greedy, of fixed lengths.

Beside it stands the limit that the matrix products alone would allow in the same run on the same machine:
prompts x output / (output x (body(prompts) + head(prompts)) + prompts x input / 512 x body(512)), where body(M) and
head(M) are the measured times of the packed products of all layers, and of the head, for M rows.

With --one-batch, or any of its three options, it is instead the latency of one batch at a time: see one_batch.py.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import numpy as np

from gapless.bench import one_batch
from gapless.bench.products import ProductTimes
from gapless.bench.profile import Profiler
from gapless.bench.report import add_report_options, envelope, positive, progress, write_json
from gapless.runtime.core.config import ServerConfig, flag
from gapless.runtime.core.options import add_options, config_from
from gapless.runtime.engine import Engine

WARM_UP_TOKENS = 4
SIZES = {
    "num_prompts": (64, "prompts"),
    "random_input_len": (128, "ids a prompt"),
    "random_output_len": (64, "ids an answer"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    for name, (default, help) in SIZES.items():
        help += f" (default: {default})"
        parser.add_argument(flag(name), type=positive, metavar="INT", help=help)
    one_batch.add_arguments(parser)
    add_report_options(parser, seed_of="the prompts", repeat=1)
    add_options(parser)
    parser.set_defaults(log_level="warning")


def run(parsed: argparse.Namespace) -> int:
    if one_batch.is_asked(parsed):
        if given := [name for name in SIZES if getattr(parsed, name)]:
            parsed.parser.error(
                f"{flag(given[0])}: not with --one-batch, which has --input-len and --output-len"
            )
        return one_batch.run(parsed)
    for name, (default, _) in SIZES.items():
        setattr(parsed, name, getattr(parsed, name) or default)
    config = config_from(parsed.parser, parsed)
    if config.model_path == "toy":
        parsed.parser.error("--model-path toy: there are no matrix products to compare with")
    report = measure(config, parsed)
    print_report(report)
    if parsed.json:
        write_json(parsed.json, report)
    return 0


def measure(config: ServerConfig, parsed: argparse.Namespace) -> dict[str, Any]:
    """All figures of the report. The limit is measured before and after each run of the engine."""
    count, input_len, output_len = parsed.num_prompts, parsed.random_input_len, parsed.random_output_len
    sizes = {name: getattr(parsed, name) for name in SIZES}
    head = envelope("offline", config.public() | sizes, parsed.seed, model=config.model_path)
    with progress("loading the model twice: for the products alone and for the engine"):
        profiler = Profiler(config)
        engine = Engine(**config.public())
    vocabulary = profiler.info.vocab_size
    random = np.random.default_rng(parsed.seed)
    products = ProductTimes(profiler, count)
    runs: list[dict[str, float]] = []
    with engine:
        warm_up = random.integers(0, vocabulary, (count, input_len)).tolist()
        with progress("warming up"):
            generate(engine, warm_up, WARM_UP_TOKENS)
        products.measure()
        for turn in range(parsed.repeat):
            prompts = random.integers(0, vocabulary, (count, input_len)).tolist()
            with progress(f"run {turn + 1} of {parsed.repeat}"):
                runs.append(generate(engine, prompts, output_len))
            products.measure()
    with progress("measuring the shares of the time"):
        shares = profiler.breakdown(prompts, output_len)
    limit = product_limit(products, count, input_len, output_len)
    duration = statistics.median(run["duration"] for run in runs)
    total_input, total_output = count * input_len, int(runs[-1]["output_tokens"])
    total = total_input + total_output
    return {
        **head,
        **sizes,
        "device": profiler.info.description,
        "durations": [run["duration"] for run in runs],
        "runs": [
            {
                "duration": seconds,
                "output_throughput": total_output / seconds,
                "total_throughput": total / seconds,
            }
            for seconds in (run["duration"] for run in runs)
        ],
        "duration": duration,
        "total_input_tokens": total_input,
        "total_output_tokens": total_output,
        "cached_tokens": int(max(run["cached_tokens"] for run in runs)),
        "output_throughput": total_output / duration,
        "total_throughput": total / duration,
        "limit": limit,
        "share_of_limit": total_output / duration / limit["output_throughput"],
        "breakdown": shares,
    }


def generate(engine: Engine, prompts: list[list[int]], output_len: int) -> dict[str, float]:
    """One run: seconds, tokens that came out, prompt tokens that were cached."""
    params = {"max_new_tokens": output_len, "temperature": 0, "ignore_eos": True}
    started = time.perf_counter()
    answers = engine.generate(input_ids=prompts, sampling_params=params)
    duration = time.perf_counter() - started
    facts = [answer["meta_info"] for answer in answers]
    return {
        "duration": duration,
        "output_tokens": sum(fact["completion_tokens"] for fact in facts),
        "cached_tokens": sum(fact["cached_tokens"] for fact in facts),
    }


def product_limit(products: ProductTimes, count: int, input_len: int, output_len: int) -> dict[str, Any]:
    """Tokens a second if a run were nothing but its matrix products, and the times that this comes from."""
    medians = products.medians()
    return {
        "output_throughput": count * output_len / products.run_seconds(count * input_len, output_len),
        "body_ms": {str(rows): 1000 * body for rows, (body, _) in medians.items()},
        "head_ms": {str(rows): 1000 * head for rows, (_, head) in medians.items()},
    }


def print_report(report: dict[str, Any]) -> None:
    limit = report["limit"]
    sizes = f"{report['num_prompts']} prompts x {report['random_input_len']} in / {report['random_output_len']} out"
    print(
        f"{report['device']}\n{sizes}, greedy, {len(report['durations'])} run(s), {report['duration']:.2f} s"
    )
    print(f"output throughput  {report['output_throughput']:9.1f} tokens/s")
    print(f"total throughput   {report['total_throughput']:9.1f} tokens/s")
    print(
        f"products alone     {limit['output_throughput']:9.1f} tokens/s; reached {report['share_of_limit']:.2f} of it"
    )
    for rows, body in limit["body_ms"].items():
        print(f"  {rows:>4} rows: all layers {body:.2f} ms, head {limit['head_ms'][rows]:.2f} ms")
    shares = sorted(report["breakdown"].items(), key=lambda item: -item[1])
    print("shares without overlap: " + ", ".join(f"{name} {share:.1%}" for name, share in shares))
    if report["cached_tokens"]:
        print(f"note: {report['cached_tokens']} prompt tokens came from the cache")
