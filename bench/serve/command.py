"""`gapless bench serve`: a load on a running server, and what its users would see.

The server says who it is and answers one small request before anything else. Then come the runs: one, or `--repeat` of
them, or one for each value of a sweep or each step of a search.
"""

from __future__ import annotations

import argparse
import resource
import statistics
from typing import Any

import uvloop

from gapless.bench.report import envelope, write_json
from gapless.bench.serve import options
from gapless.bench.serve.dialects import Asking
from gapless.bench.serve.metrics import DEFINITIONS
from gapless.bench.serve.plot import Run, write_plot
from gapless.bench.serve.runner import Runner
from gapless.bench.serve.search import find_max_rate
from gapless.bench.serve.server import Facts, probe
from gapless.bench.serve.table import sweep_table, table
from gapless.runtime.core.errors import ConfigError, ModelLoadError
from gapless.runtime.core.http_client import HttpClient
from gapless.runtime.tokenizer.base import Tokenizer
from gapless.runtime.tokenizer.load import load_tokenizer

add_arguments = options.add_arguments
Report = dict[str, Any]


def run(parsed: argparse.Namespace) -> int:
    """0; 1 where no request of any run completed."""
    options.check(parsed)
    _allow_open_files()
    try:
        client = HttpClient(options.base_url(parsed), headers=options.headers(parsed))
    except ValueError as error:
        raise ConfigError(f"--base-url or --header: {error}") from error
    report, drawn = uvloop.run(_measure(parsed, client))
    if parsed.json:
        write_json(parsed.json, report, lines=True)
    if parsed.plot:
        write_plot(parsed.plot, drawn)
    return 0 if any(figures["completed"] for figures in _runs_of(report)) else 1


async def _measure(parsed: argparse.Namespace, client: HttpClient) -> tuple[Report, list[Run]]:
    report = envelope("serve", options.public(parsed), parsed.seed)
    try:
        facts = await probe(client, parsed.backend, parsed.model)
        asking = Asking(
            backend=parsed.backend,
            model=facts.model,
            temperature=parsed.temperature,
            ignore_eos=not parsed.disable_ignore_eos,
            chat=parsed.chat,
            incremental=facts.incremental,
            extra=options.extra_body(parsed),
        )
        tokenizer = _tokenizer(parsed, facts)
        report |= {
            "model": facts.model,
            "device": facts.info.get("device"),
            "server": facts.public(),
            "backend": parsed.backend,
            "dataset_name": parsed.dataset_name,
            "definitions": DEFINITIONS,
        }
        runner = Runner(parsed, client, asking, facts, tokenizer)
        try:
            return report | await _runs(parsed, runner, report), runner.drawn
        except BaseException:  # an interrupt, or the server refuses to go on
            _keep(parsed, report, runner.finished)
            raise
    finally:
        await client.close()


def _keep(parsed: argparse.Namespace, head: Report, finished: list[Report]) -> None:
    """The runs that were over when the others could not be made."""
    if finished:
        print(sweep_table(finished))
        if parsed.json:
            write_json(parsed.json, head | {"points": finished}, lines=True)


async def _runs(parsed: argparse.Namespace, runner: Runner, head: Report) -> Report:
    """The runs that the options ask for; prints them."""
    if parsed.find_max_rate:
        found = await find_max_rate(lambda rate: runner.run(rate=rate), parsed.slo_share)
        print(sweep_table(found.runs))
        print(f"highest rate at which {parsed.slo_share:.0%} keep the limits: {found.rate:.3g} requests/s")
        return {"max_rate": found.rate, "points": found.runs}
    if sweep := options.sweep_from(parsed):
        points = []
        for value in sweep.values:
            by_rate = sweep.name == "request-rate"
            points.append(await (runner.run(rate=value) if by_rate else runner.run(concurrency=int(value))))
        print(sweep_table(points))
        return {"points": points}
    runs = [await runner.run() for _ in range(parsed.repeat)]
    if len(runs) > 1:
        print(sweep_table(runs))
    middle = medians(runs)
    print(table(head | middle))
    return middle | {"runs": runs}


def medians(runs: list[Report]) -> Report:
    """What is the same in all runs as it is, of other figures the median, and all their warnings."""
    found: Report = {"warnings": list(dict.fromkeys(warning for run in runs for warning in run["warnings"]))}
    for name, value in runs[0].items():
        values = [figures[name] for figures in runs]
        if name in ("details", "samples", "warnings"):
            continue
        if all(other == value for other in values):
            found[name] = value
        elif name != "seed" and all(isinstance(other, int | float) for other in values):
            found[name] = statistics.median(values)
    return found


def _allow_open_files() -> None:
    """As many as the system permits: each request on its way has a connection."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _runs_of(report: Report) -> list[Report]:
    found: list[Report] = report.get("points") or report["runs"]
    return found


def _tokenizer(parsed: argparse.Namespace, facts: Facts) -> Tokenizer:
    path = parsed.tokenizer or facts.model_path
    if not path:
        raise ConfigError("the server does not say where its tokenizer is: give --tokenizer")
    try:
        return load_tokenizer(path)
    except ModelLoadError as error:
        if parsed.tokenizer:
            raise
        raise ConfigError(
            f"the server's tokenizer cannot be used here, give --tokenizer: {error.message}"
        ) from error
