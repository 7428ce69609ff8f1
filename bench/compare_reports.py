"""What a report says that can be compared: figures by name, the values of its requests, and how it was made."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from gapless.bench.report import KEYS
from gapless.bench.significance import Floats, block_count, blocks
from gapless.runtime.core.errors import ConfigError

Report = dict[str, Any]

HIGHER = re.compile(r"throughput|goodput|speedup|hit_rate|share_of_limit|max_rate")  # is better
LOWER = re.compile(r"duration|latency|idle_share|_(ms|us)(_|\.|$)")
NO_RESULT = re.compile(
    r"(^|[ .])(std|min|max)_(?!step|rate)|send_lag|client_|retokenized|oracle|sleep_overshoot|limits"
)
HEADLINES = {
    "serve": (
        "output_throughput",
        "median_ttft_ms",
        "p99_ttft_ms",
        "median_tpot_ms",
        "median_e2e_latency_ms",
    ),
    "offline": ("output_throughput",),
    "one-batch": ("prefill_latency", "median_decode_latency"),
    "overhead": ("host_us_median",),
    "radix": ("median_us",),
    "cache": ("hit_rate",),
    "overlap": ("synchronous.step_ms", "overlapped.step_ms", "overlapped.gap_ms"),
    "shared-prefix": ("duration.cached", "duration.uncached"),
}
CELL = (  # what tells the entries of `results` and `points` from each other
    *("op", "tokens", "page_size", "nodes", "workload", "policy", "eviction", "memory_share", "batch", "lag"),
    *("steps", "streaming", "batch_size", "input_len", "output_len", "request_rate", "max_concurrency"),
)
WORKLOAD = (  # settings beside the envelope's, ours and SGLang's
    *("backend", "dataset", "dataset_name", "request_rate", "max_concurrency", "burstiness", "num_prompts"),
    *("random_input_len", "random_output_len", "random_range_ratio", "sharegpt_output_len", "model_id"),
)
NO_SETTINGS = {  # where it ran and wrote to, how often, what a server did when it was asked
    *("host", "port", "base_url", "json", "output_file", "plot", "html", "trace", "tag", "repeat", "seed"),
    *("status", "live_requests", "running", "waiting", "used_tokens", "idle_violations", "load_seconds"),
    "max_prompt_tokens",  # follows from the pool
}
LATENCY = re.compile(r"(mean|median|p\d+)_(ttft|tpot|itl|e2e_latency)_ms")
RATE = re.compile(r"(request|input|output|total)_throughput")


def load(path: Path) -> Report:
    """A report of ours, or the last line of what SGLang's or vLLM's serving benchmark wrote; else a ConfigError."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: {getattr(error, 'strerror', None) or error}") from error
    report = _parsed(path, text)
    if not isinstance(report, dict):
        raise ConfigError(f"{path}: not a report: JSON, but no object")
    if isinstance(report.get("benchmark"), str) and "machine" in report:
        return report
    if "request_throughput" in report and "completed" in report:
        return report | {"benchmark": "serve"}
    raise ConfigError(f"{path}: not a report of `gapless bench` (no `benchmark` and `machine`)")


def figures(report: Report) -> dict[str, list[float]]:
    """By name, a figure's value in each run."""
    found = {name: [value] for name, value in _figures(report)}
    runs = [dict(_figures(run)) for run in _runs(report)]
    for name in dict.fromkeys(name for run in runs for name in run):
        found[name] = [run[name] for run in runs if name in run]
    return found


def is_higher_better(name: str) -> bool:
    return HIGHER.search(name) is not None


def headlines(benchmark: str, names: list[str]) -> set[str]:
    """Those figures on which the verdict rests; all of a benchmark that names none."""
    wanted = HEADLINES.get(benchmark, ())
    return {name for name in names if name.rpartition(" ")[2] in wanted} or set(names)


def values(report: Report, name: str) -> tuple[list[Floats], float | None] | None:
    """What figure `name` of a single run is made of: values in blocks, in the order of time, and their percentile.

    Percentile None: their mean. None where the report does not tell, or has several runs.
    """
    label, _, name = name.rpartition(" ")
    runs = (
        [point for point in report["points"] if _label(point) == label]
        if label
        else _runs(report) or [report]
    )
    details = runs[0].get("details") or report
    if len(runs) > 1 or not details.get("ttfts"):
        return None
    known = {"ttft"} | ({"itl"} if "itls" in details else set())
    if "itls" in details or "e2e_latencies" in details:
        known |= {"tpot", "e2e_latency"}
    if (match := LATENCY.fullmatch(name)) and match[2] in known:
        percent = None if match[1] == "mean" else 50.0 if match[1] == "median" else float(match[1][1:])
        return blocks(_latencies(details, match[2])), percent
    if (match := RATE.fullmatch(name)) and "start_times" in details and "e2e_latency" in known:
        return _rates(details, match[1]), None
    return None


def settings(report: Report) -> dict[str, Any]:
    """How it was made, by name; what a report does not tell is missing."""
    found = {
        key: report[key] for key in ("device", "model", "seed", *WORKLOAD) if report.get(key) is not None
    }
    for part in ("machine", "versions", "options", "server"):
        inside = report.get(part) or {}
        found |= {f"{part}.{key}": value for key, value in inside.items() if key not in NO_SETTINGS}
    return found


def hit_rate(report: Report) -> float | None:
    """The share of the prompts' tokens that came from the cache; the mean of the runs."""
    rates = [run["cache_hit_rate"] for run in _parts(report) if run.get("cache_hit_rate") is not None]
    if rates:
        return float(np.mean(rates))
    if report.get("cached_tokens") is None or not report.get("total_input_tokens"):
        return None
    return float(report["cached_tokens"] / report["total_input_tokens"])


def failed(report: Report) -> int:
    return sum(run.get("failed") or 0 for run in _parts(report))


def _parsed(path: Path, text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        try:
            return json.loads(text.strip().rpartition("\n")[2])
        except ValueError:
            raise ConfigError(f"{path}: not JSON: {error}") from error


def _runs(report: Report) -> list[Report]:
    runs = report.get("runs")
    return runs if isinstance(runs, list) else []


def _parts(report: Report) -> list[Report]:
    """The runs that its counts are in."""
    return _runs(report) or report.get("points") or [report]


def _label(entry: Mapping[str, Any]) -> str:
    """What tells an entry of `results` or `points` from the others."""
    return " ".join(f"{name}={entry[name]}" for name in CELL if name in entry)


def _figures(node: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    for key, value in node.items():
        if key in KEYS or key in ("details", "runs", "server", "samples", *CELL):
            continue
        if key in ("results", "points") and isinstance(value, list):
            for entry in value:
                yield from _figures(entry, f"{_label(entry)} ")
        elif isinstance(value, dict):
            yield from _figures(value, f"{prefix}{key}.")
        elif _is_figure(f"{prefix}{key}", value):
            yield f"{prefix}{key}", float(value)


def _is_figure(name: str, value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return False
    return not NO_RESULT.search(name) and bool(HIGHER.search(name) or LOWER.search(name))


def _latencies(details: Mapping[str, Any], metric: str) -> list[Floats]:
    """Seconds, of the requests that have some, in the order of the dataset."""
    found = []
    for index in _completed(details):
        ttft = details["ttfts"][index]
        later = details["output_lens"][index] - 1
        if metric == "ttft":
            found.append(np.array([ttft]))
        elif metric == "itl":
            found.append(np.array(details["itls"][index]))
        elif metric == "e2e_latency":
            found.append(np.array([_e2e(details, index)]))
        elif later > 0:
            found.append(np.array([(_e2e(details, index) - ttft) / later]))
    return found


def _rates(details: Mapping[str, Any], kind: str) -> list[Floats]:
    """What ended in each slice of the time."""
    done = _completed(details)
    if not done:
        return []
    inputs, outputs = (
        np.array([details[key][index] for index in done]) for key in ("input_lens", "output_lens")
    )
    counts = {"request": np.ones(len(done)), "input": inputs, "output": outputs, "total": inputs + outputs}
    ends = [details["start_times"][index] + _e2e(details, index) for index in done]
    span = min(details["start_times"]), max(ends)
    sums, _ = np.histogram(ends, block_count(len(done)), span, weights=counts[kind])
    return [np.array([amount]) for amount in sums]


def _completed(details: Mapping[str, Any]) -> list[int]:
    errors = details.get("errors") or [""] * len(details["ttfts"])
    return [index for index, error in enumerate(errors) if not error]


def _e2e(details: Mapping[str, Any], index: int) -> float:
    if "e2e_latencies" in details:
        return float(details["e2e_latencies"][index])
    return float(details["ttfts"][index] + sum(details["itls"][index]))
