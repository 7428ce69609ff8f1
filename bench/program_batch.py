"""Many items of one `run_batch` on the simulated device, all in flight: what a program in flight costs this process."""

from __future__ import annotations

import resource
import time
from pathlib import Path
from typing import Any

import gapless
from gapless import Engine, ProgramState, gen
from gapless.runtime.core.errors import InternalError

OUTPUT_LEN = 8
_STATUS = Path("/proc/self/status")
_SAMPLES = 100  # of the number of threads, in the course of a run


@gapless.function
def answer(s: ProgramState, number: int, every: int, threads: list[int]) -> None:
    s += f"Question {number}:" + gen("answer", max_tokens=OUTPUT_LEN, temperature=0, ignore_eos=True)
    if number % every == 0:
        threads.append(status("Threads"))
        _ = s["answer"]
        threads.append(status("Threads"))


def measure(items: int) -> dict[str, Any]:
    """Seconds, bytes of this process's memory and its threads before the batch, at its peak and after it."""
    with Engine("toy", device="sim") as engine:
        every, threads = max(items // _SAMPLES, 1), list[int]()
        kwargs = {"every": every, "threads": threads}
        answer.run_batch(
            [{"number": number, **kwargs} for number in range(8)], backend=engine
        )  # starts the loop
        threads.clear()
        before, memory = status("Threads"), 1024 * status("VmRSS")
        started = time.perf_counter()
        states = answer.run_batch([{"number": number, **kwargs} for number in range(items)], backend=engine)
        duration = time.perf_counter() - started
        after = status("Threads")
        failed = [error for state in states if (error := state.error()) is not None]
        if failed:
            raise InternalError(f"{len(failed)} of {items} items failed: {failed[0]}")
    peak = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {
        "items": items,
        "output_len": OUTPUT_LEN,
        "duration": duration,
        "item_throughput": items / duration,
        "rss_before": memory,
        "rss_peak": peak,
        "bytes_per_item": (peak - memory) / items,
        "threads": {"before": before, "most": max(threads), "after": after},
    }


def status(name: str) -> int:
    """A number of /proc/self/status; sizes are in KiB."""
    (line,) = (line for line in _STATUS.read_text().splitlines() if line.startswith(f"{name}:"))
    return int(line.split()[1])


def summary(result: dict[str, Any]) -> str:
    memory, threads = (
        {name: result[f"rss_{name}"] / (1 << 20) for name in ("before", "peak")},
        result["threads"],
    )
    return (
        f"run_batch of {result['items']} items on the simulated device, {result['output_len']} tokens each: "
        f"{result['duration']:.2f} s ({result['item_throughput']:.0f} items/s)\n"
        f"memory {memory['before']:.0f} MiB before, {memory['peak']:.0f} MiB at the peak "
        f"({result['bytes_per_item'] / 1024:.1f} KiB an item); "
        f"threads {threads['before']} before, {threads['most']} at most, {threads['after']} after\n"
    )
