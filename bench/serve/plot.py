"""Runs as pictures: a PNG, or an HTML page that loads nothing else. Needs matplotlib, which is loaded on use."""

from __future__ import annotations

import importlib.util
import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from gapless.bench.serve.metrics import times
from gapless.bench.serve.record import Record
from gapless.bench.serve.table import table
from gapless.runtime.core.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SUFFIXES = (".html", ".png")
BINS = 100  # of the time of a run
POINTS = 501  # of a distribution, however many values it has
STYLE = "body{font:14px sans-serif;margin:2em}svg{max-width:100%;height:auto}pre{font-size:12px}"
LOADS = {"request_rate": "requests/s", "max_concurrency": "concurrent requests"}
NO_METADATA = dict.fromkeys(("Creator", "Date", "Format", "Type"))

Floats = npt.NDArray[np.float64]
Counts = npt.NDArray[np.signedinteger[Any]]


@dataclass(frozen=True)
class Run:
    """One run: what to call it, its report and measured requests, and the server's load from time to time.

    A sample of the load has `at` (seconds since the run began), `running`, `waiting` and, where known, `used_tokens`.
    """

    label: str
    report: Mapping[str, Any]
    records: Sequence[Record]
    samples: Sequence[Mapping[str, float]] = ()


def check_plot(path: Path) -> None:
    """Raises ConfigError, before any work, where write_plot() cannot draw such a file."""
    if path.suffix not in SUFFIXES:
        raise ConfigError(f"--plot {path}: the name must end in {' or '.join(SUFFIXES)}")
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("--plot: matplotlib is missing; pip install 'gapless[plot]'")


def write_plot(path: Path, runs: Sequence[Run]) -> None:
    """Latencies, tokens a second and load of all runs, and what the last one's batches were made of."""
    import matplotlib

    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "gapless", "font.size": 9}):
        figure = _draw(runs)
        if path.suffix == ".png":
            figure.savefig(path, format="png", dpi=120)
            return
        svg = io.StringIO()
        figure.savefig(svg, format="svg", metadata=NO_METADATA)
    drawing = svg.getvalue()
    page = [
        '<!doctype html><meta charset="utf-8"><title>gapless bench serve</title>',
        f"<style>{STYLE}</style>{drawing[drawing.index('<svg') :]}",
        *(f"<h2>{escape(run.label)}</h2><pre>{escape(table(run.report))}</pre>" for run in runs),
    ]
    path.write_text("\n".join(page), encoding="utf-8")


def _draw(runs: Sequence[Run]) -> Figure:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 7), layout="constrained")
    axes = figure.subplots(2, 3)
    labels = [run.label for run in runs]
    latencies = [[times(record) for record in run.records if record.completed] for run in runs]
    _cdf(axes[0, 0], "TTFT", labels, [[t.ttft for t in each] for each in latencies])
    _cdf(axes[0, 1], "TPOT", labels, [[t.tpot for t in each] for each in latencies])
    _cdf(axes[0, 2], "E2E", labels, [[t.e2e for t in each] for each in latencies])
    _throughput(axes[1, 0], runs)
    _composition(axes[1, 1], runs[-1])
    if loads := _loads([run.report for run in runs]):
        _ttft_by_load(axes[1, 2], *loads)
    else:
        _cdf(axes[1, 2], "ITL", labels, [[gap for t in each for gap in t.itls] for each in latencies])
    return figure


def _cdf(axes: Axes, name: str, labels: Sequence[str], runs: Sequence[Sequence[float | None]]) -> None:
    shares = np.linspace(0, 1, POINTS)
    for label, seconds in zip(labels, runs, strict=True):
        ms = [1000 * value for value in seconds if value is not None]
        axes.plot(np.quantile(ms, shares) if ms else np.full(POINTS, np.nan), shares, label=label)
    axes.set(title=name, xlabel="ms", ylabel="share", ylim=(0, 1.02))
    axes.legend()


def _throughput(axes: Axes, runs: Sequence[Run]) -> None:
    """Output tokens a second of all requests, and how many of them run (dashed, at the right)."""
    right = axes.twinx()
    for place, run in enumerate(runs):
        edges, chunks = _edges(run), [chunk for record in run.records for chunk in record.chunks]
        weights = [chunk.tokens for chunk in chunks]
        tokens, _ = np.histogram([chunk.at for chunk in chunks], edges, weights=weights)
        axes.stairs(tokens / np.diff(edges), edges, color=f"C{place}")
        right.plot(edges, sum(_running(run.records, edges)), "--", color=f"C{place}", linewidth=0.8)
    axes.set(title="output (solid), running requests (dashed)", xlabel="s", ylabel="tokens/s")
    for each in (axes, right):
        each.set_ylim(bottom=0)


def _composition(axes: Axes, run: Run) -> None:
    """The server's own samples; without them, what the client sees: which requests wait for their first token."""
    if run.samples:
        seconds = [sample["at"] for sample in run.samples]
        for key in ("running", "waiting"):
            axes.step(seconds, [sample[key] for sample in run.samples], where="post", label=key)
        if all("used_tokens" in sample for sample in run.samples):
            right = axes.twinx()
            right.plot(seconds, [sample["used_tokens"] for sample in run.samples], "--", color="grey")
            right.set(ylabel="used tokens (dashed)")
            right.set_ylim(bottom=0)
    else:
        edges = _edges(run)
        waiting, running = _running(run.records, edges)
        axes.stackplot(edges, waiting, running, labels=["before the first token", "after it"], alpha=0.7)
    axes.set(title=f"batch composition, {run.label}", xlabel="s", ylabel="requests")
    axes.set_ylim(bottom=0)
    axes.legend()


def _ttft_by_load(axes: Axes, name: str, points: Sequence[tuple[float, Mapping[str, Any]]]) -> None:
    for statistic in ("median", "p99"):
        ttfts = [report[f"{statistic}_ttft_ms"] for _, report in points]
        axes.plot([load for load, _ in points], ttfts, "o-", label=statistic)
    axes.set(title=f"TTFT against {name}", xlabel=name, ylabel="ms")
    axes.set_ylim(bottom=0)
    axes.legend()


def _loads(reports: Sequence[Mapping[str, Any]]) -> tuple[str, list[tuple[float, Mapping[str, Any]]]] | None:
    """By what option the runs' load differs, and their reports by its value, ascending; None if it does not.

    Infinite loads and runs without a TTFT have no place on an axis.
    """
    for key, name in LOADS.items():
        points = [
            (float(report[key]), report)
            for report in reports
            if report.get(key) is not None and report["median_ttft_ms"] is not None
        ]
        points = sorted((point for point in points if math.isfinite(point[0])), key=lambda point: point[0])
        if points and points[0][0] < points[-1][0]:
            return name, points
    return None


def _edges(run: Run) -> Floats:
    """BINS equal parts of the time from the first request to the last end."""
    began = min((record.sent for record in run.records), default=0.0)
    ended = max((record.ended for record in run.records), default=0.0)
    return np.linspace(began, ended if ended > began else began + 1, BINS + 1)


def _running(records: Sequence[Record], at: Floats) -> tuple[Counts, Counts]:
    """How many requests wait for their first token, and how many have it and go on, at these times."""
    sent, first, ended = (
        np.searchsorted(np.sort(moments), at, "right")
        for moments in (
            [record.sent for record in records],
            [record.chunks[0].at if record.chunks else record.ended for record in records],
            [record.ended for record in records],
        )
    )
    return sent - first, first - ended
