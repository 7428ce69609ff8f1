"""What every report says beside its figures: where, with what and how they were made."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import gapless


def envelope(benchmark: str, options: dict[str, Any], seed: int) -> dict[str, Any]:
    """The common keys of a JSON report."""
    return {
        "benchmark": benchmark,
        "machine": {"cpu": _cpu_name(), "cores": len(os.sched_getaffinity(0)), "system": platform.platform()},
        "versions": {
            "gapless": gapless.__version__,
            "python": platform.python_version(),
            "torch": importlib.metadata.version("torch"),
            "numpy": importlib.metadata.version("numpy"),
        },
        "commit": _commit(),
        "options": options,
        "seed": seed,
    }


def write_json(path: Path, report: dict[str, Any]) -> None:
    path.write_text(json.dumps(report, indent=2) + "\n")


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
