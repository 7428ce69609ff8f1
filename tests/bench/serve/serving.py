"""Runs `gapless bench serve` in this process against a server."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx

from gapless.bench.serve import command
from gapless.runtime.core.options import Parser

QUIET = ("--no-progress", "--tokenizer", "toy", "--warmup-requests", "0")


def bench_serve(url: str, directory: Path, *options: str) -> tuple[int, dict[str, Any]]:
    """The exit code and the report. No warm-up and the byte tokenizer, unless the options say otherwise."""
    parser = Parser()
    command.add_arguments(parser)
    file = directory / "report.json"
    parsed = parser.parse_args(["--base-url", url, *QUIET, "--json", str(file), *options])
    parsed.parser = parser
    code = command.run(parsed)
    return code, json.loads(file.read_text())


def requests_of(url: str, report: dict[str, Any]) -> list[dict[str, Any]]:
    """The log of a scripted server without the small request that comes before a run."""
    log: list[dict[str, Any]] = httpx.get(f"{url}/log").json()
    assert report["benchmark"] == "serve"
    return log[1:]
