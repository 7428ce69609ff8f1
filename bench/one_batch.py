"""The latency of one static batch: all its prompts come at once, and nothing else runs (SGLang's bench_one_batch).

The scheduler's loop and the device run in this process, without sockets, and the loop tells when each step ended:
those are true step times, which an engine's stream could only tell after the text was made. Times are the wall's, from
the submission of the batch and from step to step, so that what the loop costs and does not hide is in them.

    prefill_latency   seconds until the step ends that brings the last of the first tokens; long prompts take several
                      steps (--chunked-prefill-size, --max-num-batched-tokens), and rows that have begun decode in them
    decode_latency    seconds from step to step while the whole batch decodes: median and 99th percentile
    total_latency     seconds until the last step ends

prefill_throughput is of the prompts' tokens, median_decode_throughput batch / median decode latency, and
overall_throughput of both kinds of tokens over the whole time.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from itertools import pairwise, product
from typing import Any

import numpy as np

from gapless.bench.in_process import InProcess
from gapless.bench.report import envelope, positive, progress, write_json
from gapless.runtime.core.config import ServerConfig, flag
from gapless.runtime.core.errors import ConfigError
from gapless.runtime.core.messages import StepOutput, ToDetokenizer, int32s
from gapless.runtime.core.options import config_from
from gapless.runtime.scheduler.main import make_device

Result = dict[str, Any]
DEFAULTS: dict[str, list[int]] = {"batch_size": [1, 8, 32], "input_len": [128], "output_len": [32]}
CELL = tuple(DEFAULTS)
WARM_UP_TOKENS = 4


class Ends:
    """A Recorder of when the last step ended."""

    last = 0.0

    def phase(self, name: str, start: float, end: float) -> None:
        pass

    def step(self, number: int, start: float, end: float) -> None:
        self.last = end


class OneBatch(InProcess):
    """Keeps, for each step that brought tokens, when it ended and for which slots."""

    def __init__(self, config: ServerConfig) -> None:
        self.page_size = config.page_size
        self._ends = Ends()
        self.steps: list[tuple[float, frozenset[int]]] = []
        super().__init__(config, make_device(config), recorder=self._ends)

    def send(self, message: ToDetokenizer) -> None:
        super().send(message)
        if isinstance(message, StepOutput) and message.slots:
            self.steps.append((self._ends.last, frozenset(int32s(message.slots).tolist())))

    def measure(self, prompts: Sequence[Sequence[int]], output_len: int) -> Result:
        """Runs one batch; the figures of the module's docstring."""
        params = {"max_new_tokens": output_len, "temperature": 0, "ignore_eos": True}
        self.steps.clear()
        started = time.perf_counter()
        self.generate(prompts, [params] * len(prompts))
        return figures(self.steps, started, len(prompts), len(prompts[0]), output_len)


def figures(
    steps: Sequence[tuple[float, frozenset[int]]], started: float, batch: int, input_len: int, output_len: int
) -> Result:
    """`steps` are the ends and the slots of all steps that brought tokens, in order."""
    begun: set[int] = set()
    first = -1  # becomes the step that brings the last of the first tokens
    while len(begun) < batch:
        first += 1
        begun |= steps[first][1]
    decode = [end - before for (before, _), (end, slots) in pairwise(steps[first:]) if len(slots) == batch]
    prefill, total = steps[first][0] - started, steps[-1][0] - started
    median = statistics.median(decode) if decode else None
    return {
        "prefill_latency": prefill,
        "prefill_throughput": batch * input_len / prefill,
        "median_decode_latency": median,
        "p99_decode_latency": float(np.percentile(decode, 99)) if decode else None,
        "median_decode_throughput": batch / median if median else None,
        "total_latency": total,
        "overall_throughput": batch * (input_len + output_len) / total,
    }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("the latency of one batch")
    group.add_argument("--one-batch", action="store_true", help="measure that; so does each of these options")
    for name, what in zip(CELL, ("prompts of a batch", "ids a prompt", "ids an answer"), strict=True):
        shown = " ".join(map(str, DEFAULTS[name]))
        group.add_argument(
            flag(name),
            type=positive,
            nargs="+",
            metavar="INT",
            help=f"{what}, one or more (default: {shown})",
        )


def is_asked(parsed: argparse.Namespace) -> bool:
    return parsed.one_batch or any(getattr(parsed, name) for name in CELL)


def run(parsed: argparse.Namespace) -> int:
    sizes = {name: getattr(parsed, name) or default for name, default in DEFAULTS.items()}
    config = config_from(parsed.parser, parsed)
    if (largest := max(sizes["batch_size"])) > config.max_running_requests:
        parsed.parser.error(
            f"--batch-size {largest}: more than --max-running-requests {config.max_running_requests}"
        )
    report = envelope("one-batch", config.public() | sizes, parsed.seed, model=config.model_path)
    with progress("loading the model"):
        rig = OneBatch(config)
    with rig:
        report["device"] = rig.info.description
        cells = list(product(*sizes.values()))
        for cell in cells:
            check_room(rig, *cell)
        report["runs"] = measure(rig, cells, parsed.repeat, parsed.seed)
    report["results"] = medians([one["results"] for one in report["runs"]])
    print_report(report)
    if parsed.json:
        write_json(parsed.json, report)
    return 0


def check_room(rig: OneBatch, batch: int, input_len: int, output_len: int) -> None:
    """Raises ConfigError where the rows of a batch could not all run at once."""
    scheduler, length = rig.scheduler, input_len + output_len
    if length > scheduler.context_length:
        raise ConfigError(
            f"--input-len {input_len} and --output-len {output_len}: the context has {scheduler.context_length}"
        )
    needed = batch * -(-length // rig.page_size) * rig.page_size
    if needed > scheduler.pool_tokens:
        raise ConfigError(
            f"--batch-size {batch}: {needed} tokens of KV, but the pool has {scheduler.pool_tokens} "
            "(--max-total-tokens)"
        )


def measure(
    rig: OneBatch, cells: Sequence[tuple[int, ...]], repeat: int, seed: int
) -> list[dict[str, list[Result]]]:
    """All cells, `repeat` times; each on new prompts, so that no prefix is cached, and once before to warm up."""
    random = np.random.default_rng(seed)

    def result(cell: tuple[int, ...], output_len: int) -> Result:
        prompts = random.integers(0, rig.info.vocab_size, cell[:2]).tolist()
        return dict(zip(CELL, cell, strict=True)) | rig.measure(prompts, output_len)

    with progress("warming up"):
        for cell in cells:
            result(cell, min(cell[2], WARM_UP_TOKENS))
    runs = []
    for turn in range(repeat):
        with progress(f"run {turn + 1} of {repeat}"):
            runs.append({"results": [result(cell, cell[2]) for cell in cells]})
    return runs


def medians(runs: Sequence[Sequence[Result]]) -> list[Result]:
    """For each cell the median of each figure; None where there is none."""
    return [
        {
            key: value if key in CELL or value is None else statistics.median(one[key] for one in same)
            for key, value in same[0].items()
        }
        for same in zip(*runs, strict=True)
    ]


def print_report(report: dict[str, Any]) -> None:
    print(f"{report['device']}\n{len(report['runs'])} run(s); milliseconds, tokens/s")
    print("batch    in   out | prefill  tokens/s |  decode      p99  tokens/s |   total  tokens/s")
    for result in report["results"]:
        sizes = " ".join(f"{result[name]:5}" for name in CELL)
        prefill, decode, p99, total = (
            _cell(result[f"{name}_latency"], 1000, 2)
            for name in ("prefill", "median_decode", "p99_decode", "total")
        )
        rates = (result[f"{name}_throughput"] for name in ("prefill", "median_decode", "overall"))
        first, then, whole = (_cell(rate, 1, 0) for rate in rates)
        print(
            f"{sizes} |{prefill:>8} {first:>9} |{decode:>8} {p99:>8} {then:>9} |{total:>8} {whole:>9}",
            flush=True,
        )


def _cell(value: float | None, scale: int, digits: int) -> str:
    return "-" if value is None else f"{scale * value:.{digits}f}"
