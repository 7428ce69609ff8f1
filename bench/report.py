"""What every benchmark's command and report have in common: options, where, with what and how figures were made."""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import math
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gapless
from gapless.runtime.core.errors import InternalError

KEYS = ("benchmark", "machine", "versions", "device", "commit", "model", "options", "seed", "started")


def add_report_options(
    parser: argparse.ArgumentParser,
    *,
    seed_of: str,
    repeat: int = 0,
    repeat_help: str = "runs; medians are reported",
) -> None:
    """Adds --seed, --json FILE (or --output-file FILE) and, where `repeat` gives a default, --repeat."""
    parser.add_argument("--seed", type=int, default=1, metavar="INT", help=f"of {seed_of} (default: 1)")
    if repeat:
        help = f"{repeat_help} (default: {repeat})"
        parser.add_argument("--repeat", type=positive, default=repeat, metavar="INT", help=help)
    parser.add_argument(
        "--json",
        "--output-file",
        dest="json",
        type=output_file,
        metavar="FILE",
        help="write the report there",
    )


def positive(text: str) -> int:
    """The type of an option that is a whole number from 1 on."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number}: must be at least 1")
    return number


def output_file(text: str) -> Path:
    """The type of an option that names a file to write: an error before the work where that cannot be done."""
    path = Path(text)
    existed = path.exists()
    if existed and not path.is_file() and not path.is_dir():
        return path  # a pipe: opening it twice would end it for its reader
    try:
        path.open("ab").close()
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{text}: {error.strerror}") from error
    if not existed:
        path.unlink()
    return path


def envelope(
    benchmark: str, options: dict[str, Any], seed: int, *, model: str | None = None, device: str | None = None
) -> dict[str, Any]:
    """The common keys of a JSON report, which come before its figures; call it when the work begins.

    `model` and `device` are None where there is none, or where it is not known yet.
    """
    return {
        "benchmark": benchmark,
        "machine": {"cpu": _cpu_name(), "cores": len(os.sched_getaffinity(0)), "system": platform.platform()},
        "versions": {
            "gapless": gapless.__version__,
            "python": platform.python_version(),
            "torch": importlib.metadata.version("torch"),
            "numpy": importlib.metadata.version("numpy"),
        },
        "device": device,
        "commit": _commit(),
        "model": model,
        "options": options,
        "seed": seed,
        "started": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
    }


def write_json(path: Path, report: dict[str, Any], *, lines: bool = False) -> None:
    """Raises InternalError where `path` cannot be written any more, and says where the report is instead.

    JSON has no infinity and no NaN: the one is written as "inf", the other as null.

    `lines`: all on one line, as readers of JSON lines want it.
    """
    text = json.dumps(_plain(report), indent=None if lines else 2, allow_nan=False) + "\n"
    try:
        path.write_text(text)
    except OSError as error:
        with tempfile.NamedTemporaryFile("w", prefix="gapless-", suffix=".json", delete=False) as rescue:
            rescue.write(text)
        raise InternalError(f"{path}: {error.strerror}; the report is in {rescue.name}") from error


@contextmanager
def progress(what: str) -> Iterator[None]:
    """Says on stderr what is going on and how long it took."""
    print(f"{what} ... ", end="", file=sys.stderr, flush=True)
    started = time.perf_counter()
    yield
    print(f"{time.perf_counter() - started:.1f} s", file=sys.stderr)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else str(value)
    return value


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _commit() -> str:
    """The checkout's commit, with a mark where files differ from it; empty for an installed package."""
    root = Path(__file__).resolve().parent.parent
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""
