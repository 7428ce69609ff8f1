"""What the scheduler's loop costs the host, and how much of it a device step hides: no model, no GPU, no HTTP.

The real loop runs on a simulated device; requests come through the loop's socket from a client process, which also
receives and decodes what the loop sends. Figures of a step:

    host_us       wall time from the return of one wait for the device to the entry of the next, sending included
    cpu_us        processor time of all threads but the client's, without the spinning in the wait
    idle_share    of the device's time in which it had nothing to run
    min_step_us_hidden   the shortest device step with an idle share within 2 % (overlapped only)

With several steps from one composition (multi-step scheduling) host and cpu are the composition's, divided by its
steps. The time by which waits come back late, because the machine oversleeps, is kept out: the device stands still
meanwhile.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from gapless.bench.overhead_plot import write_plot
from gapless.bench.overhead_rig import Case, Rig
from gapless.bench.report import add_report_options, envelope, output_file, write_json
from gapless.overlap.cost_model import PROFILES, SHAPES, CostModel, shape_named
from gapless.runtime.core.config import flag
from gapless.runtime.core.plan import Plan
from gapless.runtime.core.trace import Trace

US = 1e6
DEFAULT_STEP_US, LONGEST_STEP_US = 1000.0, 100_000.0
DEFAULT_MODEL = "llama-3-8b"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    def number(name: str, kind: type, default: Any, help: str) -> None:
        help += f" (default: {default})" if default is not None else ""
        parser.add_argument(name, type=kind, default=default, metavar=kind.__name__.upper(), help=help)

    parser.add_argument(
        "--batch", type=_sizes, default=(1, 64, 256, 1024), metavar="INT,...", help="(default: 1,64,256,1024)"
    )
    number("--step-us", float, None, f"length of a device step, microseconds; else {DEFAULT_STEP_US:.0f}")
    parser.add_argument(
        "--sim-device", choices=tuple(PROFILES), help="GPU whose time a step takes, by a roofline model"
    )
    parser.add_argument(
        "--sim-model",
        metavar="NAME_OR_PATH",
        help=f"with --sim-device: {', '.join(SHAPES)}, or a model's path",
    )
    number("--num-steps", int, 500, "steps measured for each line")
    number("--num-scheduler-steps", int, 4, "steps of one composition, beside 1; 1: no multi-step lines")
    number("--output-len", int, 0, "mean output length, those that end replaced at once; 0: endless")
    parser.add_argument(
        "--streaming",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="send each step; else only those in which a request begins or ends (default: --streaming)",
    )
    add_report_options(parser, seed_of="prompts and lengths")
    parser.add_argument("--html", type=output_file, metavar="FILE", help="draw the report there")
    parser.add_argument(
        "--trace",
        type=Path,
        metavar="FILE",
        help="write a Chrome trace of the measured steps; costs time itself",
    )


def run(parsed: argparse.Namespace) -> int:
    _check(parsed)
    trace = Trace(parsed.trace) if parsed.trace else None
    report: dict[str, Any] = {
        **envelope(
            "overhead",
            _options(parsed),
            parsed.seed,
            model=parsed.sim_model or (DEFAULT_MODEL if parsed.sim_device else None),
            device=f"simulated {parsed.sim_device}" if parsed.sim_device else "simulated",
        ),
        "sleep_overshoot_us": sleep_overshoot_us(),
        "results": [],
    }
    print_head(report)
    for case in cases(parsed):
        with Rig(case, trace) as rig:
            result = measure(rig)
        report["results"].append(result)
        print_result(result)
    if trace is not None:
        trace.close()
    if parsed.json:
        write_json(parsed.json, report)
    if parsed.html:
        write_plot(parsed.html, report)
    return 0


def cases(parsed: argparse.Namespace) -> list[Case]:
    """Without and with overlap, one step from a composition and several, for each batch size."""
    cost: Callable[[Plan], float]
    if parsed.sim_device:
        cost = CostModel(PROFILES[parsed.sim_device], shape_named(parsed.sim_model or DEFAULT_MODEL))
    else:
        seconds = (parsed.step_us or DEFAULT_STEP_US) / US

        def cost(_: Plan) -> float:
            return seconds

    return [
        Case(batch, lag, steps, parsed.streaming, parsed.output_len, parsed.num_steps, parsed.seed, cost)
        for batch in parsed.batch
        for lag in (0, 1)
        for steps in sorted({1, parsed.num_scheduler_steps})
    ]


def measure(rig: Rig) -> dict[str, Any]:
    """One entry of the report's `results`."""
    rig.warm_up()
    window, case = rig.measure(), rig.case
    host, cpu, phases = window.per_step(case.steps)
    hidden = rig.min_step_hidden(float(np.median(host))) if case.lag else None
    return {
        "batch": case.batch,
        "lag": case.lag,
        "steps": case.steps,
        "streaming": case.streaming,
        "step_us": window.busy / window.steps * US,
        "host_us_median": float(np.median(host)) * US,
        "host_us_p99": float(np.percentile(host, 99)) * US,
        "cpu_us_median": float(np.median(cpu)) * US,
        "phases": {name: seconds * US for name, seconds in sorted(phases.items())},
        "idle_share": window.idle_share,
        "effective_step_us": window.effective_step * US,
        "min_step_us_hidden": None if hidden is None else hidden * US,
        "finished": window.finished,
    }


def sleep_overshoot_us() -> dict[str, float]:
    """By how much this machine's sleeps are longer than asked for."""
    asked, over = 100e-6, []
    for _ in range(100):
        started = time.perf_counter()
        time.sleep(asked)
        over.append((time.perf_counter() - started - asked) * US)
    return {"median": float(np.median(over)), "p99": float(np.percentile(over, 99))}


def print_head(report: dict[str, Any]) -> None:
    over = report["sleep_overshoot_us"]
    machine = report["machine"]
    print(f"{machine['cpu']}, {machine['cores']} cores; microseconds a step, medians")
    print(f"sleeps are {over['median']:.0f} us too long here (p99 {over['p99']:.0f}), which is kept out")
    names = "batch lag steps | step  idle  effective | host   p99   cpu | hidden | finished | phases"
    print(names)


def print_result(result: dict[str, Any]) -> None:
    hidden = result["min_step_us_hidden"]
    phases = "  ".join(f"{name} {us:.0f}" for name, us in result["phases"].items())
    print(
        f"{result['batch']:5} {result['lag']:3} {result['steps']:5} |"
        f"{result['step_us']:5.0f} {result['idle_share']:5.1%} {result['effective_step_us']:10.0f} |"
        f"{result['host_us_median']:5.0f} {result['host_us_p99']:5.0f} {result['cpu_us_median']:5.0f} |"
        f"{'-' if hidden is None else format(hidden, '.0f'):>7} | {result['finished']:8} | {phases}",
        flush=True,
    )


def _sizes(text: str) -> tuple[int, ...]:
    sizes = tuple(int(word) for word in text.split(","))
    if not sizes or min(sizes) < 1:
        raise argparse.ArgumentTypeError(f"{text}: batch sizes must be at least 1")
    return sizes


def _check(parsed: argparse.Namespace) -> None:
    error = parsed.parser.error
    for name, least in (("num_steps", 2), ("num_scheduler_steps", 1), ("output_len", 0)):
        if getattr(parsed, name) < least:
            error(f"{flag(name)} {getattr(parsed, name)}: must be at least {least}")
    if parsed.step_us is not None and not 1 <= parsed.step_us <= LONGEST_STEP_US:
        error(f"--step-us {parsed.step_us:g}: must be between 1 and {LONGEST_STEP_US:.0f}")
    if parsed.step_us is not None and parsed.sim_device:
        error("--step-us and --sim-device both say how long a step takes: give one")
    if parsed.sim_model and not parsed.sim_device:
        error("--sim-model needs --sim-device")


def _options(parsed: argparse.Namespace) -> dict[str, Any]:
    names = ("batch", "step_us", "sim_device", "sim_model", "num_steps", "num_scheduler_steps")
    return {name: getattr(parsed, name) for name in (*names, "output_len", "streaming")}
