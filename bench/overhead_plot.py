"""The overhead report as one HTML page with two charts, in SVG."""

from __future__ import annotations

import math
from html import escape
from pathlib import Path
from typing import Any

WIDTH, HEIGHT, MARGIN = 640, 360, 64
COLOURS = ("#1b6ca8", "#c8553d", "#588157", "#8d6a9f")
SERIES = {
    "host_us_median": "host, median",
    "host_us_p99": "host, p99",
    "cpu_us_median": "CPU of all threads, median",
    "min_step_us_hidden": "shortest step that hides it",
}


def write_plot(path: Path, report: dict[str, Any]) -> None:
    results = report["results"]
    plain = [result for result in results if result["lag"] == 1 and result["steps"] == 1]
    costs = {
        label: [(r["batch"], r[key]) for r in plain if r[key] is not None] for key, label in SERIES.items()
    }
    idle: dict[str, list[tuple[float, float]]] = {}
    for result in results:
        label = f"lag {result['lag']}, {result['steps']} step(s) a composition"
        idle.setdefault(label, []).append((result["batch"], 100 * result["idle_share"]))
    machine, step = report["machine"], results[0]["step_us"]
    body = [
        f"<h1>Host cost of a step</h1><p>{escape(machine['cpu'])}, {machine['cores']} cores</p>",
        _chart("microseconds a step, overlapped", costs, logarithmic=True),
        _chart(f"device idle, % (first step {step:.0f} us)", idle, logarithmic=False),
    ]
    head = '<!doctype html><meta charset="utf-8"><title>gapless bench overhead</title>'
    style = "<style>body{font:14px sans-serif;margin:2em}svg{display:block;margin:1em 0}</style>"
    path.write_text(head + style + "".join(body) + "\n")


def _chart(title: str, series: dict[str, list[tuple[float, float]]], *, logarithmic: bool) -> str:
    """Lines over batch size (a logarithmic axis); y begins at a power of ten or at zero."""
    points = [point for line in series.values() for point in line]
    sizes = sorted({x for x, _ in points})
    top = max(y for _, y in points)
    if logarithmic:
        low = math.floor(math.log10(max(min(y for _, y in points), 0.1)))
        high = max(math.ceil(math.log10(top)), low + 1)
        ticks = [step * 10.0**power for power in range(low, high) for step in (1, 2, 5)] + [10.0**high]
    else:
        ticks = [max(top, 1.0) * part / 4 for part in range(5)]

    def across(x: float) -> float:
        span = math.log(sizes[-1] / sizes[0]) or 1.0
        return MARGIN + (WIDTH - 2 * MARGIN) * math.log(x / sizes[0]) / span

    def up(y: float) -> float:
        if logarithmic:
            share = (math.log10(max(y, ticks[0])) - low) / (high - low)
        else:
            share = y / ticks[-1]
        return HEIGHT - MARGIN - (HEIGHT - 2 * MARGIN) * share

    parts = [_text(WIDTH / 2, 20, title, "middle")]
    for y in ticks:
        parts.append(f'<path d="M{MARGIN} {up(y):.1f}H{WIDTH - MARGIN}" stroke="#ddd"/>')
        parts.append(_text(MARGIN - 6, up(y) + 4, f"{y:.3g}", "end"))
    parts += [_text(across(x), HEIGHT - MARGIN + 18, f"{x:g}", "middle") for x in sizes]
    parts.append(_text(WIDTH / 2, HEIGHT - 28, "running requests", "middle"))
    for place, (label, line) in enumerate(series.items()):
        colour = COLOURS[place % len(COLOURS)]
        path = " ".join(f"{across(x):.1f},{up(y):.1f}" for x, y in line)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [f'<circle cx="{across(x):.1f}" cy="{up(y):.1f}" r="3" fill="{colour}"/>' for x, y in line]
        parts.append(_text(WIDTH + 8, MARGIN + 18 * place, label, "start", colour))
    return f'<svg width="{WIDTH + 240}" height="{HEIGHT}" font-size="12">{"".join(parts)}</svg>'


def _text(x: float, y: float, text: str, anchor: str, colour: str = "#333") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}">{escape(text)}</text>'
