"""A run's figures as text for the terminal. A figure that is missing is `-`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from gapless.bench.serve.metrics import DEFINITIONS, STATISTICS

Report = Mapping[str, Any]

RUN = ("backend", "model", "dataset_name", "request_rate", "max_concurrency")
COUNTS = """\
requests       {completed} completed, {failed} failed, {cut} cut, {unsent} not sent, in {duration} s
input tokens   {total_input_tokens} (the client's count: {asked_input_tokens}), {cached_tokens} from the cache: \
hit rate {cache_hit_rate}
output tokens  {total_output_tokens} of {asked_output_tokens} asked, {total_output_tokens_retokenized} retokenised; \
{early_stops} early stops"""
RATES = (
    ("request throughput", "request_throughput", "requests/s"),
    ("input throughput", "input_throughput", "tokens/s"),
    ("output throughput", "output_throughput", "tokens/s"),
    ("total throughput", "total_throughput", "tokens/s"),
    ("concurrency", "concurrency", "requests"),
    ("goodput", "goodput", "requests/s"),
)
LATENCIES = (
    ("TTFT", "ttft"),
    ("TPOT", "tpot"),
    ("ITL", "itl"),
    ("chunk gap", "chunk_gap"),
    ("E2E", "e2e_latency"),
    ("send lag", "send_lag"),
)
SWEEP = (
    ("rate", "request_rate"),
    ("limit", "max_concurrency"),
    ("completed", "completed"),
    ("failed", "failed"),
    ("requests/s", "request_throughput"),
    ("tokens/s", "output_throughput"),
    ("TTFT p50", "median_ttft_ms"),
    ("TTFT p99", "p99_ttft_ms"),
    ("TPOT p50", "median_tpot_ms"),
    ("TPOT p99", "p99_tpot_ms"),
    ("goodput", "goodput"),
    ("share", "goodput_share"),
)


def table(report: Report) -> str:
    """Counts, rates, latencies, definitions and, last, the report's `warnings`."""
    run = ", ".join(f"{key.replace('_', ' ')} {report[key]}" for key in RUN if report.get(key) is not None)
    cells = _Cells({key: cell(value) for key, value in report.items()})
    errors = [f"  {count} failed: {message}" for message, count in report.get("error_counts", {}).items()]
    lines = [run, COUNTS.format_map(cells), *errors, *_rates(report), *_latencies(report)]
    return "\n".join([*filter(None, lines), "", DEFINITIONS, *_warnings([report])])


def sweep_table(reports: Sequence[Report]) -> str:
    """A line for each run, latencies in milliseconds, then all warnings, each once."""
    shown = [(name, key) for name, key in SWEEP if any(report.get(key) is not None for report in reports)]
    rows = [[name for name, _ in shown], *([cell(report.get(key)) for _, key in shown] for report in reports)]
    return "\n".join([*columns(rows), *_warnings(reports)])


def columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of cells that end at the same place in all of them."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(str.rjust, row, widths)) for row in rows]


def cell(value: object) -> str:
    if value is None:
        return "-"
    return f"{value:.2f}" if isinstance(value, float) else str(value)


class _Cells(dict[str, str]):
    def __missing__(self, key: str) -> str:
        return "-"


def _rates(report: Report) -> list[str]:
    shown = RATES if report.get("goodput_limits") else RATES[:-1]
    lines = [f"{name:<18} {cell(report.get(key)):>12} {unit}" for name, key, unit in shown]
    if shown is RATES:
        limits = ", ".join(f"{name} {limit:g} ms" for name, limit in report["goodput_limits"].items())
        lines[-1] += f"; {cell(report['goodput_share'])} of the requests within {limits}"
    return lines


def _latencies(report: Report) -> list[str]:
    rows = [
        [label, *(cell(report.get(f"{statistic}_{name}_ms")) for statistic in STATISTICS)]
        for label, name in LATENCIES
    ]
    return columns([["ms", *STATISTICS], *rows])


def _warnings(reports: Iterable[Report]) -> list[str]:
    found = dict.fromkeys(warning for report in reports for warning in report.get("warnings", ()))
    return [f"warning: {warning}" for warning in found]
