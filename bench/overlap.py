"""What overlap hides, and what it costs, on the CPU with a real model.

The device thread is the only one of its process that runs torch. Were it not so, each forward would pay for a second
team of OpenMP threads; so the length of a device step must be the same with and without overlap, and the gap between
two steps, which is the loop's own work, must go away with it. Both schedules run in turn in one process, on one loaded
model.
"""

from __future__ import annotations

import argparse
import statistics
from itertools import pairwise

import numpy as np

from gapless.bench.report import add_report_options, envelope, write_json
from gapless.overlap.device import Device
from gapless.runtime.core.config import ServerConfig
from gapless.runtime.core.messages import Submit, ToDetokenizer, ToScheduler, column
from gapless.runtime.core.options import add_options, config_from
from gapless.runtime.core.plan import DeviceInfo
from gapless.runtime.core.sampling import SamplingParams
from gapless.runtime.scheduler.loop import Loop
from gapless.runtime.scheduler.main import make_device
from gapless.runtime.scheduler.scheduler import Scheduler

SCHEDULES = {0: "synchronous", 1: "overlapped"}  # by lag
LEAST = {"num_prompts": 1, "random_input_len": 1, "random_output_len": 8}


class Mailbox:
    """Both channels of a loop: what to do, once, and nobody who listens."""

    def __init__(self, messages: list[ToScheduler]) -> None:
        self._messages = messages

    def wait(self, timeout_ms: int) -> bool:
        return bool(self._messages)

    def drain(self) -> list[ToScheduler]:
        messages, self._messages = self._messages, []
        return messages

    def send(self, message: ToDetokenizer) -> None:
        pass


class StepTimes:
    """A Recorder of when each device step began and ended."""

    def __init__(self) -> None:
        self.spans: list[tuple[float, float]] = []

    def phase(self, name: str, start: float, end: float) -> None:
        pass

    def step(self, number: int, start: float, end: float) -> None:
        self.spans.append((start, end))

    def decode(self, count: int) -> tuple[float, float]:
        """Median length of the last `count` steps and of the gaps before them, seconds."""
        spans = self.spans[-count - 1 :]
        gaps = [begin - end for (_, end), (begin, _) in pairwise(spans)]
        return float(np.median([end - begin for begin, end in spans[1:]])), float(np.median(gaps))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    def number(name: str, default: int, help: str) -> None:
        parser.add_argument(
            name, type=int, default=default, metavar="INT", help=f"{help} (default: {default})"
        )

    number("--num-prompts", 64, "requests that run at once")
    number("--random-input-len", 32, "ids a prompt")
    number("--random-output-len", 32, "ids an answer, at least 8")
    add_report_options(
        parser,
        seed_of="the prompts",
        repeat=3,
        repeat_help="runs of each schedule, in turn; medians are reported",
    )
    add_options(parser)
    parser.set_defaults(log_level="warning")


def run(parsed: argparse.Namespace) -> int:
    for name, low in LEAST.items():
        if getattr(parsed, name) < low:
            parsed.parser.error(f"--{name.replace('_', '-')}: must be at least {low}")
    config = config_from(parsed.parser, parsed)
    sizes = {name: getattr(parsed, name) for name in LEAST}
    report = envelope("overlap", config.public() | sizes, parsed.seed, model=config.model_path)
    device = make_device(config)
    info = device.start()
    report |= {"device": info.description, "num_prompts": parsed.num_prompts, "runs": []}
    for turn in range(parsed.repeat):
        report["runs"].append(
            {
                name: step_times(config, device, info, lag, parsed, seed=parsed.seed + turn)
                for lag, name in SCHEDULES.items()
            }
        )
    device.stop()
    print(f"{info.description}\n{parsed.num_prompts} rows; milliseconds of a decode step, medians")
    for name in SCHEDULES.values():
        medians = {
            key: statistics.median(run[name][key] for run in report["runs"]) for key in ("step_ms", "gap_ms")
        }
        report[name] = medians
        print(f"{name:12} device step {medians['step_ms']:8.3f}  gap before it {medians['gap_ms']:7.3f}")
    if parsed.json:
        write_json(parsed.json, report)
    return 0


def step_times(
    config: ServerConfig, device: Device, info: DeviceInfo, lag: int, parsed: argparse.Namespace, *, seed: int
) -> dict[str, float]:
    """One run; median length of its decode steps and of the gaps before them, milliseconds."""
    random = np.random.default_rng(seed)
    prompts = random.integers(0, info.vocab_size, (parsed.num_prompts, parsed.random_input_len))
    params = SamplingParams(max_new_tokens=parsed.random_output_len, temperature=0.0, ignore_eos=True)
    mailbox = Mailbox(
        [Submit(uid, column(prompt, "<i4"), params, (), seed=uid) for uid, prompt in enumerate(prompts)]
    )
    scheduler, times = Scheduler(config, info), StepTimes()
    loop = Loop(
        scheduler,
        device,
        mailbox,
        mailbox,
        lag=lag,
        steps=config.num_scheduler_steps,
        watchdog_s=config.watchdog_timeout,
        recorder=times,
    )
    loop.turn()
    while not scheduler.is_idle:
        loop.turn()
    step, gap = times.decode(parsed.random_output_len // 2)
    return {"step_ms": 1000 * step, "gap_ms": 1000 * gap}
