"""What programs of the DSL gain over plain calls: the same work written both ways, and the programs without the cache.

Three workloads: few-shot classification (a long shared prompt, a select of four labels a question), tree of thought
(every thought is followed by others, level by level) and conversations of several turns. Each is done in three ways:

    program    as programs of the DSL, in one run_batch
    plain      as calls of /generate, each sent when the one before it is answered; a label's score is one call
    uncached   the same programs on an engine with --disable-radix-cache; of the few-shot questions only some, from
               which the seconds and the tokens of all of them follow

Each way begins with an empty cache, the ways take turns at being the first, and each run has new texts. Prompt tokens
are counted by the engine, over all requests; computed are those that were not found in the cache.

    speedup          seconds of plain / seconds of program
    prefill_ratio    computed by uncached / computed by program

The fourth workload, batch, runs first: many items of one run_batch on the simulated device, and what a program in
flight costs in memory and threads.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import statistics
import time
from collections.abc import Iterator, Sequence
from typing import Any

from gapless.bench import program_batch
from gapless.bench.program_models import InProcess, Model, Served
from gapless.bench.program_workloads import Workload, few_shot, multi_turn, tree
from gapless.bench.report import add_report_options, envelope, positive, progress, write_json
from gapless.runtime.core.config import ServerConfig, flag
from gapless.runtime.core.errors import ConfigError
from gapless.runtime.core.http_client import HttpClient
from gapless.runtime.core.options import add_options, config_from

SIZES = {
    "questions": (200, "few-shot: questions"),
    "shared_len": (1500, "few-shot: tokens of the prompt that the questions share, at least"),
    "uncached_questions": (2, "few-shot: questions that are asked without the cache"),
    "trees": (1, "tree-of-thought: trees at once"),
    "branches": (3, "tree-of-thought: thoughts that follow each one"),
    "depth": (3, "tree-of-thought: levels"),
    "problem_len": (200, "tree-of-thought: words of a problem"),
    "thought_len": (16, "tree-of-thought: tokens of a thought"),
    "users": (32, "multi-turn: conversations"),
    "turns": (8, "multi-turn: questions of each"),
    "system_len": (32, "multi-turn: words that all conversations begin with"),
    "question_len": (16, "multi-turn: words of a question"),
    "answer_len": (8, "multi-turn: tokens of an answer"),
    "items": (10_000, "batch: items"),
}
WORKLOADS = ("few-shot", "tree-of-thought", "multi-turn", "batch")
WAYS = ("program", "plain", "uncached")
FIGURES = ("duration", "prompt_tokens", "computed_tokens", "hit_rate")
POOL_TOKENS = 65_536  # where --max-total-tokens is not given: two models are loaded
Result = dict[str, Any]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    shown = "{" + ",".join(WORKLOADS) + "}"
    help = "one or more (default: all)"
    parser.add_argument(
        "--workload", nargs="+", choices=WORKLOADS, default=list(WORKLOADS), metavar=shown, help=help
    )
    for name, (default, help) in SIZES.items():
        help = f"{help} (default: {default})"
        parser.add_argument(flag(name), type=positive, default=default, metavar="INT", help=help)
    for name, help in (
        ("--base-url", "a server to measure, in place of engines here; nobody else may use it meanwhile"),
        ("--uncached-base-url", "one with --disable-radix-cache"),
    ):
        parser.add_argument(name, type=server_url, metavar="URL", help=help)
    parser.add_argument("--markdown", action="store_true", help="print the table in Markdown")
    add_report_options(parser, seed_of="the texts", repeat=1)
    add_options(parser)
    parser.set_defaults(log_level="warning")


def server_url(text: str) -> str:
    try:
        HttpClient(text.rstrip("/"))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return text


def run(parsed: argparse.Namespace) -> int:
    config = config_from(parsed.parser, parsed, max_total_tokens=parsed.max_total_tokens or POOL_TOKENS)
    if config.disable_radix_cache:
        parsed.parser.error("--disable-radix-cache: this benchmark runs with the cache and without it")
    if parsed.uncached_base_url and not parsed.base_url:
        parsed.parser.error("--uncached-base-url: needs --base-url")
    sizes = {name: getattr(parsed, name) for name in (*SIZES, "workload", "repeat")}
    report = envelope("programs", config.public() | sizes, parsed.seed, model=config.model_path) | sizes
    if "batch" in parsed.workload:  # first: the memory's peak is the whole process's
        with progress(f"a batch of {parsed.items} items"):
            report["batch"] = program_batch.measure(parsed.items)
        print(program_batch.summary(report["batch"]))
    if names := [name for name in parsed.workload if name != "batch"]:
        report |= measure(names, config, parsed)
        print_report(report, parsed.markdown)
    if parsed.json:
        write_json(parsed.json, report)
    return 0


def measure(names: Sequence[str], config: ServerConfig, parsed: argparse.Namespace) -> dict[str, Any]:
    """The runs, and of their figures the medians, workload by workload."""
    runs = []
    with contextlib.ExitStack() as stack:
        models = opened_models(config, parsed, stack)
        with progress("warming up"):
            for model in models.values():
                warm_up = multi_turn(
                    parsed.seed, users=4, turns=2, system_len=8, question_len=8, output_len=4
                )
                warm_up.program(model)
                warm_up.plain(model)
        for turn in range(parsed.repeat):
            results = []
            for name in names:
                with progress(f"run {turn + 1} of {parsed.repeat}, {name}"):
                    results.append(measure_workload(name, models, parsed, turn))
            runs.append({"results": results})
        about: dict[str, Any] = {"device": models["program"].device}
        if isinstance(served := models["program"], Served):
            about |= {"server": served.info, "model": served.info["model_path"]}
    return about | {"runs": runs, "results": medians([run["results"] for run in runs])}


def opened_models(
    config: ServerConfig, parsed: argparse.Namespace, stack: contextlib.ExitStack
) -> dict[str, Model]:
    """By way; `uncached` is missing where a server is measured and none without a cache is given."""

    def opened(model: Model) -> Model:
        stack.callback(model.close)
        return model

    if not parsed.base_url:
        with progress("loading the model twice: with the cache and without it"):
            cached = opened(InProcess(**config.public()))
            uncached = opened(InProcess(**dataclasses.replace(config, disable_radix_cache=True).public()))
        return dict(zip(WAYS, (cached, cached, uncached), strict=True))
    models: dict[str, Model] = {}
    for option, ways in (("base_url", WAYS[:2]), ("uncached_base_url", WAYS[2:])):
        if url := getattr(parsed, option):
            server = Served(url, config.api_key)
            models |= dict.fromkeys(ways, opened(server))
            if bool(server.info["disable_radix_cache"]) != (option == "uncached_base_url"):
                has = "no prefix cache" if option == "base_url" else "a prefix cache"
                raise ConfigError(f"{flag(option)}: the server at {url} has {has}")
    return models


def workload(name: str, parsed: argparse.Namespace, seed: int, model: Model, *, uncached: bool) -> Workload:
    match name:
        case "few-shot":
            asked = min(parsed.uncached_questions, parsed.questions) if uncached else parsed.questions
            return few_shot(seed, model.count, asked, parsed.shared_len, parsed.questions / asked)
        case "tree-of-thought":
            sizes = parsed.trees, parsed.problem_len, parsed.branches, parsed.depth, parsed.thought_len
            return tree(seed, *sizes)
        case _:
            lengths = parsed.system_len, parsed.question_len, parsed.answer_len
            return multi_turn(seed, parsed.users, parsed.turns, *lengths)


def measure_workload(name: str, models: dict[str, Model], parsed: argparse.Namespace, turn: int) -> Result:
    """All ways, each run beginning with another one of them."""
    figures, answers = {}, {}
    for way in (*WAYS[turn % len(WAYS) :], *WAYS[: turn % len(WAYS)]):
        if way in models:
            work = workload(name, parsed, parsed.seed + turn, models[way], uncached=way == "uncached")
            figures[way], answers[way] = measure_way(work, way, models[way])
    program, plain = (answers[way] for way in WAYS[:2])
    result: Result = {"workload": name}
    result |= {figure: {way: figures[way][figure] for way in WAYS if way in figures} for figure in FIGURES}
    result["same_answers"] = sum(a == b for a, b in zip(program, plain, strict=True)) / len(program)
    seconds, computed = result["duration"], result["computed_tokens"]
    result["speedup"] = seconds["plain"] / seconds["program"]
    if "uncached" in models:
        result["prefill_ratio"] = computed["uncached"] / computed["program"]
    return result


def measure_way(work: Workload, way: str, model: Model) -> tuple[Result, list[Any]]:
    """(figures, answers)"""
    model.flush()
    before, started = model.tokens(), time.perf_counter()
    answers = work.plain(model) if way == "plain" else work.program(model)
    seconds, tokens = time.perf_counter() - started, model.tokens() - before
    figures = (work.scale * seconds, work.scale * tokens.prompt, work.scale * tokens.computed)
    return dict(zip(FIGURES, (*figures, tokens.cached / tokens.prompt), strict=True)), answers


def medians(runs: Sequence[Sequence[Result]]) -> list[Result]:
    """For each workload, of each figure."""

    def median(values: Sequence[Any]) -> Any:
        if isinstance(values[0], dict):
            return {key: median([value[key] for value in values]) for key in values[0]}
        return values[0] if isinstance(values[0], str) else statistics.median(values)

    return [median(same) for same in zip(*runs, strict=True)]


def print_report(report: dict[str, Any], markdown: bool) -> None:
    print(f"{report['model']} on {report['device']}; {report['repeat']} run(s)\n")
    titles = ("workload", "way", "seconds", "prompt tokens", "computed", "hit rate", "time", "prefill")
    rows = [row for result in report["results"] for row in _rows(result)]
    if markdown:
        for cells in (titles, ("---", "---", *["---:"] * 6), *rows):
            print(f"| {' | '.join(cells)} |")
    else:
        for cells in (titles, *rows):
            print(f"{cells[0]:16}{cells[1]:10}" + "".join(f"{cell:>14}" for cell in cells[2:]))
    for result in report["results"]:
        print(
            f"\n{result['workload']}: {result['same_answers']:.0%} of the program's answers are the plain calls'",
            end="",
        )
    print()


def _rows(result: Result) -> Iterator[tuple[str, ...]]:
    """A line for each way. The last two cells say how many times as much it took as the program did."""
    seconds, computed = result["duration"], result["computed_tokens"]
    for way in result["duration"]:
        yield (
            result["workload"],
            way,
            f"{seconds[way]:.1f}",
            f"{result['prompt_tokens'][way]:,.0f}",
            f"{computed[way]:,.0f}",
            f"{result['hit_rate'][way]:.1%}",
            f"{seconds[way] / seconds['program']:.2f}",
            f"{computed[way] / computed['program']:.2f}",
        )
