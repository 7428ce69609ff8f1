"""The options of `gapless bench serve`, beside those of datasets and arrivals, and what they mean together."""

from __future__ import annotations

import argparse
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from gapless.bench.report import add_report_options, output_file
from gapless.bench.serve import arrivals, datasets, plot
from gapless.bench.serve.dialects import BACKENDS
from gapless.bench.serve.goodput import Goodput, parse_goodput
from gapless.bench.serve.metrics import DEFINITIONS
from gapless.runtime.core.errors import ConfigError

KEY_VARIABLES = ("GAPLESS_API_KEY", "OPENAI_API_KEY")
SWEPT = ("request-rate", "max-concurrency")
SECRET = (
    "header",
    "run",
    "parser",
    "json",
    "plot",
)  # not part of what made the figures, or nobody's business


@dataclass(frozen=True, slots=True)
class Sweep:
    name: str  # of SWEPT
    values: tuple[float, ...]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = DEFINITIONS
    server = parser.add_argument_group("server")
    server.add_argument("--backend", choices=BACKENDS, default="gapless", help="its kind (default: gapless)")
    server.add_argument("--base-url", metavar="URL", help="with or without /v1 (default: http://HOST:PORT)")
    server.add_argument("--host", default="127.0.0.1", metavar="HOST", help="(default: 127.0.0.1)")
    server.add_argument("--port", type=int, default=30000, metavar="INT", help="(default: 30000)")
    server.add_argument("--model", metavar="NAME", help="else the one that the server has")
    server.add_argument(
        "--tokenizer", metavar="PATH", help="as --model-path of the server; else what it says of itself"
    )
    server.add_argument(
        "--header",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="sent with each request; may be repeated",
    )
    server.add_argument(
        "--flush-cache", action="store_true", help="empty the server's prefix cache before each run"
    )
    asked = parser.add_argument_group("requests", f"A key is taken from {' or '.join(KEY_VARIABLES)}.")
    asked.add_argument("--temperature", type=float, default=0.0, metavar="FLOAT", help="(default: 0)")
    asked.add_argument(
        "--disable-ignore-eos", action="store_true", help="let answers end before the length asked for"
    )
    asked.add_argument("--chat", action="store_true", help="send each prompt as a user's message")
    asked.add_argument(
        "--extra-request-body", default="{}", metavar="JSON", help="joins each request's fields"
    )
    asked.add_argument(
        "--request-timeout", type=float, default=3600.0, metavar="FLOAT", help="seconds (default: 3600)"
    )
    datasets.add_arguments(parser)
    arrivals.add_arguments(parser)
    _add_report(parser)


def _add_report(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("runs and report")
    group.add_argument(
        "--goodput",
        nargs="+",
        default=[],
        metavar="NAME:MS",
        help="limits that a good request keeps, all of them: ttft, tpot, e2el, in milliseconds",
    )
    group.add_argument(
        "--find-max-rate",
        action="store_true",
        help="search the highest request rate at which enough requests keep the --goodput limits",
    )
    group.add_argument(
        "--slo-share", type=float, default=0.95, metavar="FLOAT", help="how many that is (default: 0.95)"
    )
    group.add_argument(
        "--sweep", metavar="NAME=V,V,...", help=f"a run for each value of one of {', '.join(SWEPT)}"
    )
    group.add_argument("--plot", type=output_file, metavar="FILE", help="draw the report: .html or .png")
    group.add_argument(
        "--output-details", action="store_true", help="keep each token's gap and the texts in the report"
    )
    group.add_argument("--no-progress", "--disable-tqdm", action="store_true", help="no live display")
    add_report_options(parser, seed_of="prompts and arrivals; run i of several has the seed + i", repeat=1)


def check(parsed: argparse.Namespace) -> None:
    """Raises ConfigError naming the option that is wrong."""
    datasets.check(parsed)
    arrivals.check(parsed)
    if not 0 <= parsed.temperature < math.inf:
        raise ConfigError(f"--temperature {parsed.temperature:g}: must be at least 0 and finite")
    if not 0 < parsed.request_timeout < math.inf:
        raise ConfigError(f"--request-timeout {parsed.request_timeout:g}: must be above 0 and finite")
    if not 0 < parsed.slo_share <= 1:
        raise ConfigError(f"--slo-share {parsed.slo_share:g}: must be above 0 and at most 1")
    extra_body(parsed)
    headers(parsed)
    sweep, goodput = sweep_from(parsed), goodput_from(parsed)
    if parsed.plot is not None:
        plot.check_plot(parsed.plot)
    if parsed.find_max_rate and goodput is None:
        raise ConfigError("--find-max-rate needs the limits of --goodput")
    if parsed.ramp_up_strategy and (parsed.find_max_rate or (sweep and sweep.name == "request-rate")):
        raise ConfigError("--ramp-up-strategy: a ramp is not a rate to search or to sweep")
    if sum((parsed.find_max_rate, sweep is not None, parsed.repeat > 1)) > 1:
        raise ConfigError("--find-max-rate, --sweep and --repeat each decide which runs there are: give one")


def base_url(parsed: argparse.Namespace) -> str:
    host = f"[{parsed.host}]" if ":" in parsed.host else parsed.host
    return (parsed.base_url or f"http://{host}:{parsed.port}").rstrip("/").removesuffix("/v1")


def headers(parsed: argparse.Namespace) -> dict[str, str]:
    key = next((value for name in KEY_VARIABLES if (value := os.environ.get(name))), None)
    given = {"authorization": f"Bearer {key}"} if key else {}
    for pair in parsed.header:
        name, separator, value = pair.partition("=")
        if not name or not separator:
            raise ConfigError(f"--header {pair}: must be NAME=VALUE")
        given[name.lower()] = value
    return given


def extra_body(parsed: argparse.Namespace) -> dict[str, Any]:
    try:
        extra = orjson.loads(parsed.extra_request_body)
    except orjson.JSONDecodeError as error:
        raise ConfigError(f"--extra-request-body: not JSON: {error}") from error
    if not isinstance(extra, dict):
        raise ConfigError("--extra-request-body: must be an object")
    sampling = extra.get("sampling_params", {})
    if not isinstance(sampling, dict):
        raise ConfigError("--extra-request-body: sampling_params must be an object")
    if not extra.get("stream", True) or any(fields.get("n", 1) != 1 for fields in (extra, sampling)):
        raise ConfigError(
            "--extra-request-body: requests are streams of one answer each, not stream: false or n"
        )
    return extra


def goodput_from(parsed: argparse.Namespace) -> Goodput | None:
    return parse_goodput(parsed.goodput) if parsed.goodput else None


def sweep_from(parsed: argparse.Namespace) -> Sweep | None:
    if parsed.sweep is None:
        return None
    name, _, values = parsed.sweep.partition("=")
    wanted = f"must be {' or '.join(SWEPT)}, =, and numbers above 0 with commas between"
    try:
        kind = int if name == "max-concurrency" else float
        sweep = Sweep(name, tuple(kind(value) for value in values.split(",")))
    except ValueError as error:
        raise ConfigError(f"--sweep {parsed.sweep}: {wanted}") from error
    if name not in SWEPT or not all(value > 0 for value in sweep.values):
        raise ConfigError(f"--sweep {parsed.sweep}: {wanted}")
    return sweep


def public(parsed: argparse.Namespace) -> dict[str, Any]:
    """The options as a report keeps them."""
    plain = {name: value for name, value in vars(parsed).items() if name not in SECRET}
    return {name: str(value) if isinstance(value, Path) else value for name, value in plain.items()}
