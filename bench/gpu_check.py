"""What continuous integration cannot see: is the CUDA device right, how fast is it, and does it wait for the host?

    python bench/gpu_check.py --json FILE          a few minutes on one GPU; exit code 0: right, 1: wrong, 3: no GPU
    python bench/gpu_check.py --device cpu --quick the same script in seconds, to see that it runs

Right: a tiny random model's greedy ids in float32 equal the CPU's, with and without overlap, for several page sizes and
step counts, and where a small pool preempts; KV pages that went to host memory and back are what they were. Fast: a
random model of the shape of Llama 3.2 1B in bfloat16, with and without overlap, and copies of its pages. Waiting: the
share of the time between steps, from their CUDA events, and the share without any kernel, from torch's profiler.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gapless.bench.gpu_trace import StepTimes, device_spans, idle_share
from gapless.bench.in_process import InProcess
from gapless.bench.random_model import ONE_BILLION, TINY, write_random_model
from gapless.bench.report import envelope, write_json
from gapless.runtime.core.config import ServerConfig
from gapless.runtime.core.plan import Copy
from gapless.runtime.scheduler.main import make_device

WRONG, NO_GPU = 1, 3
SEED = 1
DRAWN = {"temperature": 0.8, "top_p": 0.9}


@dataclass(frozen=True)
class Sizes:
    """How much is run."""

    prompts: int  # for correctness
    output_len: int
    shape: dict[str, Any]  # of the model whose speed is measured
    batches: tuple[int, ...]
    speed_input_len: int
    speed_output_len: int
    warm_up_steps: int  # before the profiler looks
    profiled_steps: int
    copied_pages: int


FULL = Sizes(8, 64, ONE_BILLION, (1, 64, 256), 128, 128, 16, 32, 256)
QUICK = Sizes(3, 8, TINY, (2,), 16, 8, 2, 3, 8)
OPTIONS: list[dict[str, Any]] = [
    {},
    {"disable_overlap_schedule": True},
    {"page_size": 1},
    {"page_size": 64, "chunked_prefill_size": 48},
    {"num_scheduler_steps": 4},
    {"max_running_requests": 2, "max_num_batched_tokens": 64, "chunked_prefill_size": 32},
    {"preemption": "swap", "max_total_tokens": 1024},
]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=str(__doc__), formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report there")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--quick", action="store_true", help="tiny models and few steps")
    parsed = parser.parse_args(arguments)
    if parsed.device == "cuda" and not _has_gpu():
        print("gpu_check: torch finds no CUDA device here", file=sys.stderr)
        return NO_GPU
    sizes = QUICK if parsed.quick else FULL
    report = envelope("gpu_check", {"device": parsed.device, "quick": parsed.quick}, SEED)
    with tempfile.TemporaryDirectory() as directory:
        report |= check_ids(parsed.device, sizes, Path(directory))
        report["copies"] = check_copies(parsed.device, sizes)
        report["passed"] &= report["copies"]["passed"]
        report["speed"] = measure_speed(parsed.device, sizes, Path(directory))
    if parsed.json:
        write_json(parsed.json, report)
    print("right" if report["passed"] else "WRONG: ids or copied pages differ", flush=True)
    return 0 if report["passed"] else WRONG


def check_ids(device: str, sizes: Sizes, directory: Path) -> dict[str, Any]:
    """Compares greedy ids with the CPU's for each of OPTIONS; for drawn ids only the share of equal ones is told."""
    model = _written(directory / "tiny", TINY, "float32")
    prompts = random_prompts(sizes.prompts, TINY["vocab_size"], 1, 200)
    # One after the other of greedy and drawn, so that they share their steps.
    params = [
        {"max_new_tokens": sizes.output_len} | ({"temperature": 0} if greedy else DRAWN)
        for _ in prompts
        for greedy in (True, False)
    ]
    doubled = [prompt for prompt in prompts for _ in range(2)]
    want = _outputs(_config(model, "cpu", attention_backend="torch"), doubled, params)
    checks = []
    for options in OPTIONS:
        got = _outputs(_config(model, device, **options), doubled, params)
        differing = [i for i in range(0, len(want), 2) if got[i] != want[i]]
        drawn_equal = sum(got[i] == want[i] for i in range(1, len(want), 2)) / len(prompts)
        checks.append({"options": options, "differing": differing, "drawn_equal_share": drawn_equal})
        print(f"ids with {options or 'the defaults'}: {'differ' if differing else 'equal'}", flush=True)
    return {"passed": not any(check["differing"] for check in checks), "ids": checks}


def check_copies(device: str, sizes: Sizes) -> dict[str, Any]:
    """Moves KV pages within the pool, to host memory and back; the rates are bytes/s, best of three."""
    import torch

    from gapless.overlap.page_copies import PagePools, copy_in_stream, copy_on_cpu

    shape, count, on_gpu = sizes.shape, sizes.copied_pages, device == "cuda"
    heads, dim = shape["num_key_value_heads"], shape["hidden_size"] // shape["num_attention_heads"]
    layers, page = (shape["num_hidden_layers"], 2), (16, heads, dim)
    pool = torch.randn((*layers, 3 * count, *page), dtype=torch.bfloat16, device=device)
    host = torch.empty((count, *layers, *page), dtype=torch.bfloat16, pin_memory=on_gpu)
    pools = PagePools(pool, host, copy_in_stream if on_gpu else copy_on_cpu)
    first, on_host = np.arange(count, dtype=np.int32), np.arange(count, dtype=np.int32)[::-1] + 1
    second, third = first + count, first + 2 * count
    rates = {}
    for copy in (Copy("out", first, on_host), Copy("in", on_host, second), Copy("page", second, third)):
        seconds = []
        for _ in range(3):
            started = time.perf_counter()
            pools.carry_out([copy])
            if on_gpu:
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - started)
        rates[copy.kind] = host.nbytes / min(seconds)
        print(f"pages {copy.kind}: {rates[copy.kind] / 1e9:.3g} GB/s", flush=True)
    moved = [pool[:, :, start : start + count].equal(pool[:, :, :count]) for start in (count, 2 * count)]
    return {"passed": all(moved), "page_bytes": host.nbytes // count, "bytes_per_s": rates}


def measure_speed(device: str, sizes: Sizes, directory: Path) -> dict[str, Any]:
    """Throughput and idle shares with and without overlap, per batch size."""
    started = time.monotonic()
    dtype = "float32" if device == "cpu" else "bfloat16"
    model = _written(directory / "speed", sizes.shape, dtype)
    print(f"wrote the model in {time.monotonic() - started:.0f} s", flush=True)
    results: list[dict[str, Any]] = []
    description = ""
    for overlap in (True, False):
        largest = max(sizes.batches)
        config = _config(
            model,
            device,
            dtype=dtype,
            disable_overlap_schedule=not overlap,
            max_running_requests=largest,
            max_num_batched_tokens=max(1024, largest),
            max_total_tokens=largest * (sizes.speed_input_len + sizes.speed_output_len + 16),
            disable_radix_cache=True,
        )
        times = StepTimes()
        with InProcess(config, make_device(config), recorder=times) as engine:
            description = engine.info.description
            for batch in sizes.batches:
                result = {"batch": batch, "overlap": overlap} | _speed(engine, times, batch, sizes)
                if device == "cuda":
                    result["idle_share_of_kernels"] = _profile(engine, batch, sizes, directory)
                results.append(result)
                print(", ".join(f"{name} {value:.4g}" for name, value in result.items()), flush=True)
    return {"device": description, "results": results}


def _speed(engine: InProcess, times: StepTimes, batch: int, sizes: Sizes) -> dict[str, Any]:
    vocabulary, count = engine.info.vocab_size, sizes.speed_output_len
    prompts = random_prompts(batch, vocabulary, sizes.speed_input_len, sizes.speed_input_len)
    engine.generate(prompts, [{"max_new_tokens": 4, "temperature": 0}] * batch)  # warms up
    times.spans.clear()
    started = time.perf_counter()
    engine.generate(prompts, [{"max_new_tokens": count, "temperature": 0}] * batch)
    seconds = time.perf_counter() - started
    return {"output_throughput": batch * count / seconds} | times.summary()


def _profile(engine: InProcess, batch: int, sizes: Sizes, directory: Path) -> float:
    """The share of the time without a kernel, while `batch` rows decode."""
    import torch

    trace = directory / "trace.json"
    prompts = random_prompts(batch, engine.info.vocab_size, 4, 4)
    count = sizes.warm_up_steps + sizes.profiled_steps + 16
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]):
        pass  # the first start takes seconds
    engine.submit(prompts, [{"max_new_tokens": count, "temperature": 0}] * batch)
    for _ in range(sizes.warm_up_steps):
        engine.loop.turn()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for _ in range(sizes.profiled_steps):
            engine.loop.turn()
    engine.finish()
    profiler.export_chrome_trace(str(trace))
    return idle_share(device_spans(trace))


def random_prompts(count: int, vocabulary: int, shortest: int, longest: int) -> list[list[int]]:
    random = np.random.default_rng(SEED)
    lengths = random.integers(shortest, longest + 1, count)
    return [random.integers(1, vocabulary, length).tolist() for length in lengths]


def _config(model: Path, device: str, **options: Any) -> ServerConfig:
    defaults: dict[str, Any] = {"dtype": "float32", "max_total_tokens": 8192, "max_running_requests": 32}
    return ServerConfig(model_path=str(model), device=device, **defaults | options)


def _outputs(config: ServerConfig, prompts: list[list[int]], params: list[dict[str, Any]]) -> list[list[int]]:
    with InProcess(config, make_device(config)) as engine:
        return engine.generate(prompts, params)


def _written(directory: Path, shape: dict[str, Any], dtype: str) -> Path:
    import torch

    torch.set_num_threads(
        1
    )  # a second team of threads, of another thread than the device's, would slow a CPU down
    write_random_model(directory, shape, getattr(torch, dtype), SEED)
    return directory


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


if __name__ == "__main__":
    if Path(sys.path[0]) == Path(__file__).parent:
        del sys.path[0]  # torch must find the standard library's `profile`, not the one beside this file
    sys.exit(main())
