"""What differs between A and B: the ratio B / A of each figure, with a 95 % confidence interval, and a verdict.

A and B are reports of one benchmark: two files, or several runs a side (--a, --b). A file made with --repeat holds
several runs, too. Also reads what SGLang's and vLLM's serving benchmarks write.

With two runs or more on one side the interval comes from the differences between runs. With one a side it comes from
the requests of each run, where the report has them: marked (1), because it knows nothing of what differs from run to
run. A difference counts if chance explains it in less than 5 % of comparisons, all headline figures (*) taken
together, and if it is larger than --tolerance.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gapless.bench import compare_reports as reports
from gapless.bench.compare_reports import Report
from gapless.bench.report import add_report_options, envelope, write_json
from gapless.bench.significance import Draws, Ratio, between_runs, bootstrap, exactly, holm, within_runs
from gapless.runtime.core.errors import ConfigError

RUNS_PERCENT, ONE_RUN_PERCENT = 2.0, 5.0
WARM_POINTS = 0.05  # of the cache's hit rate
EXACT = ("cache",)  # benchmarks whose figures depend on their seed alone


@dataclass
class Figure:
    """One line. `ratio` is None where nothing tells how the figure spreads; `a` and `b` are means of the runs."""

    name: str
    headline: bool
    higher_is_better: bool
    a: float
    b: float
    ratio: Ratio | None
    one_run: bool  # it is known from the requests of one run a side
    differs: bool = False

    @property
    def change(self) -> float:
        """Of B against A, percent."""
        return 100 * (self.b / self.a - 1) if self.a else float("nan")

    @property
    def is_worse(self) -> bool:
        return self.differs and (self.b < self.a) == self.higher_is_better

    @property
    def verdict(self) -> str:
        if self.ratio is None:
            return "unknown"
        if not self.differs:
            return "no difference"
        direction = "lower" if self.b < self.a else "higher"
        return f"B is {direction} by {abs(self.change):.1f} %, {'worse' if self.is_worse else 'better'}"


@dataclass
class Comparison:
    benchmark: str
    figures: list[Figure]
    warnings: list[str]

    @property
    def differences(self) -> list[Figure]:
        """Those of the headline figures."""
        return [figure for figure in self.figures if figure.headline and figure.differs]

    @property
    def verdict(self) -> str:
        if self.differences:
            return "; ".join(f"{figure.name}: {figure.verdict}" for figure in self.differences)
        if any(figure.headline and figure.ratio for figure in self.figures):
            return "no difference"
        return "unknown: one run a side, and too few requests in the reports to tell; repeat both (--repeat)"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("files", type=Path, nargs="*", metavar="A.json B.json", help="two reports")
    for side in ("a", "b"):
        parser.add_argument(
            f"--{side}", type=Path, nargs="+", metavar="FILE", help=f"reports of {side.upper()}, instead"
        )
    parser.add_argument(
        "--tolerance",
        type=float,
        metavar="PERCENT",
        help="differences up to this are none "
        f"(default: {RUNS_PERCENT:g}; {ONE_RUN_PERCENT:g} with one run a side)",
    )
    parser.add_argument(
        "--fail-on-regression", action="store_true", help="exit code 1 where B is worse in a headline figure"
    )
    add_report_options(parser, seed_of="what the bootstrap draws")


def run(parsed: argparse.Namespace) -> int:
    sides = _sides(parsed)
    if parsed.tolerance is not None and not 0 <= parsed.tolerance < 100:
        parsed.parser.error(f"--tolerance {parsed.tolerance:g}: must be at least 0 and less than 100")
    a, b = ([reports.load(path) for path in paths] for paths in sides)
    comparison = compare(a, b, np.random.default_rng(parsed.seed), parsed.tolerance)
    print_comparison(comparison)
    if parsed.json:
        names = {side: [str(path) for path in paths] for side, paths in zip("ab", sides, strict=True)}
        options = {**names, "tolerance": parsed.tolerance}
        write_json(parsed.json, envelope("compare", options, parsed.seed) | to_json(comparison))
    return int(parsed.fail_on_regression and any(figure.is_worse for figure in comparison.differences))


def compare(
    a: Sequence[Report], b: Sequence[Report], random: np.random.Generator, tolerance: float | None = None
) -> Comparison:
    """Raises ConfigError where the reports are not of one benchmark or share no figure. `tolerance`: percent."""
    benchmarks = dict.fromkeys(report["benchmark"] for report in (*a, *b))
    if len(benchmarks) > 1:
        raise ConfigError(f"the reports are of different benchmarks: {', '.join(benchmarks)}")
    (benchmark,) = benchmarks
    runs_a, runs_b = _runs(a), _runs(b)
    names = [name for name in runs_a if name in runs_b]
    if not names:
        raise ConfigError("the reports have no figure in common")
    headlines = reports.headlines(benchmark, names)
    figures = []
    for name in sorted(names, key=lambda name: name not in headlines):
        ratio, one_run = _ratio(benchmark, name, (a, runs_a[name]), (b, runs_b[name]), random)
        mean_a, mean_b = (_mean(runs[name]) for runs in (runs_a, runs_b))
        better = reports.is_higher_better(name)
        figures.append(Figure(name, name in headlines, better, mean_a, mean_b, ratio, one_run))
    _decide([figure for figure in figures if figure.headline], benchmark, tolerance)
    _decide([figure for figure in figures if not figure.headline], benchmark, tolerance)
    warnings = _warnings(a, b)
    if alone := len(runs_a.keys() ^ runs_b.keys()):
        warnings.append(f"{alone} figures are in one side alone")
    return Comparison(benchmark, figures, warnings)


def print_comparison(comparison: Comparison) -> None:
    """A line for each figure, headlines first; warnings go to stderr."""
    width = max(len(figure.name) for figure in comparison.figures) + 2
    print(f"{'figure':{width}} {'A':>10} {'B':>10} {'B / A':>7}  {'95 % interval':16} verdict")
    for figure in comparison.figures:
        name = figure.name + (" *" if figure.headline else "")
        ratio, interval = (f"{figure.b / figure.a:7.3f}" if figure.a else f"{'-':>7}"), "-"
        if figure.ratio is not None:
            interval = f"{figure.ratio.low:.3f} to {figure.ratio.high:.3f}"
        mark = " (1)" if figure.one_run else ""
        print(
            f"{name:{width}} {figure.a:10.4g} {figure.b:10.4g} {ratio}  {interval:16} {figure.verdict}{mark}"
        )
    if any(figure.one_run for figure in comparison.figures):
        print("(1) within one run a side: what differs from run to run is not known; repeat both to know")
    for warning in comparison.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    print(f"verdict: {comparison.verdict}")


def to_json(comparison: Comparison) -> dict[str, Any]:
    return {
        "compared": comparison.benchmark,
        "verdict": comparison.verdict,
        "warnings": comparison.warnings,
        "figures": [asdict(figure) | {"verdict": figure.verdict} for figure in comparison.figures],
    }


def _sides(parsed: argparse.Namespace) -> tuple[list[Path], list[Path]]:
    if len(parsed.files) == 2 and not parsed.a and not parsed.b:
        return [parsed.files[0]], [parsed.files[1]]
    if not parsed.files and parsed.a and parsed.b:
        return parsed.a, parsed.b
    raise ConfigError("give two reports, A.json B.json, or --a FILE ... and --b FILE ...")


def _runs(side: Iterable[Report]) -> dict[str, list[float]]:
    """A side's values of each figure, one a run."""
    found: dict[str, list[float]] = {}
    for report in side:
        for name, values in reports.figures(report).items():
            found.setdefault(name, []).extend(values)
    return found


def _mean(values: Sequence[float]) -> float:
    """Geometric, whose ratio the tests are about; 0 where a value is not above 0."""
    return float(np.exp(np.mean(np.log(values)))) if min(values) > 0 else 0.0


def _ratio(
    benchmark: str,
    name: str,
    a: tuple[Sequence[Report], Sequence[float]],
    b: tuple[Sequence[Report], Sequence[float]],
    random: np.random.Generator,
) -> tuple[Ratio | None, bool]:
    """What is known of B / A, and whether it is from the requests of one run a side. Sides are reports and values."""
    (reports_a, values_a), (reports_b, values_b) = a, b
    if min(*values_a, *values_b) <= 0:  # there are no ratios
        same = set(values_a) == set(values_b) and len(set(values_a)) == 1
        return (Ratio(1.0, 1.0, 1.0, 1.0) if same else None), False
    if benchmark in EXACT:
        return exactly(_mean(values_a), _mean(values_b)), False
    if len(values_a) + len(values_b) > 2:
        return between_runs(values_a, values_b), False
    draws_a, draws_b = (_draws(side[0], name, random) for side in (reports_a, reports_b))
    if draws_a is None or draws_b is None:
        return None, False
    return within_runs(values_a[0], values_b[0], draws_a, draws_b), True


def _draws(report: Report, name: str, random: np.random.Generator) -> Draws | None:
    found = reports.values(report, name)
    draws = None if found is None else bootstrap(*found, random)
    return None if draws is None or draws.values.min() <= 0 else draws


def _decide(figures: Sequence[Figure], benchmark: str, tolerance: float | None) -> None:
    """Sets `differs` in a family of figures."""
    known = [(figure, figure.ratio) for figure in figures if figure.ratio is not None]
    for (figure, ratio), stands in zip(known, holm([ratio.p for _, ratio in known]), strict=True):
        percent = ONE_RUN_PERCENT if figure.one_run else 0.0 if benchmark in EXACT else RUNS_PERCENT
        least = 1 + (percent if tolerance is None else tolerance) / 100
        figure.differs = stands and max(ratio.value, 1 / ratio.value) > least


def _warnings(a: Sequence[Report], b: Sequence[Report]) -> list[str]:
    found = _different_settings(*([reports.settings(report) for report in side] for side in (a, b)))
    rate_a, rate_b = (_hit_rate(side) for side in (a, b))
    if rate_a is not None and rate_b is not None and abs(rate_a - rate_b) > WARM_POINTS:
        warmer = "A" if rate_a > rate_b else "B"
        found.append(f"the cache was warmer in {warmer}: hit rate {rate_a:.1%} in A, {rate_b:.1%} in B")
    for side, name in ((a, "A"), (b, "B")):
        if count := sum(map(reports.failed, side)):
            found.append(f"{count} requests failed in {name}: its figures are of the others alone")
    return found


def _different_settings(a: Sequence[Report], b: Sequence[Report]) -> list[str]:
    """One line for each setting that is not the same on both sides, or that one side says nothing of."""
    found = []
    for key in dict.fromkeys(key for settings in (*a, *b) for key in settings):
        in_a, in_b = (_distinct(settings[key] for settings in side if key in settings) for side in (a, b))
        if in_a == in_b:
            continue
        part = key.partition(".")[0]
        silent = [name for name, side in (("A", a), ("B", b)) if not any(_tells(one, part) for one in side)]
        where = f"{in_a or 'not given'} in A, {in_b or 'not given'} in B"
        found.append(f"{part} is not told in {silent[0]}" if silent else f"{key} differs: {where}")
    return list(dict.fromkeys(found))


def _tells(settings: Report, part: str) -> bool:
    return any(key.partition(".")[0] == part for key in settings)


def _hit_rate(side: Sequence[Report]) -> float | None:
    rates = [rate for rate in map(reports.hit_rate, side) if rate is not None]
    return float(np.mean(rates)) if rates else None


def _distinct(values: Iterable[Any]) -> str:
    return " or ".join(dict.fromkeys(str(value) for value in values))
