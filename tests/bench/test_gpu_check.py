"""The check for a GPU runs here too, on the CPU and on tiny models, so that it works where it is needed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from gapless.bench import gpu_check
from gapless.bench.gpu_trace import StepTimes, device_spans, idle_share

SCRIPT = Path(__file__).parents[2] / "bench" / "gpu_check.py"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(SCRIPT), *arguments], capture_output=True, text=True, timeout=300, check=False
    )


def test_it_runs_on_the_cpu(tmp_path: Path) -> None:
    done = run("--device", "cpu", "--quick", "--json", str(tmp_path / "report.json"))
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["passed"] and not any(check["differing"] for check in report["ids"])
    assert len(report["ids"]) == len(gpu_check.OPTIONS)
    assert report["copies"]["passed"] and set(report["copies"]["bytes_per_s"]) == {"out", "in", "page"}
    assert [result["overlap"] for result in report["speed"]["results"]] == [True, False]
    for result in report["speed"]["results"]:
        assert result["steps"] >= 8 and result["output_throughput"] > 0
        assert 0 <= result["idle_share_between_steps"] < 1


def test_without_a_gpu_it_says_so_by_its_exit_code() -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    done = run()
    assert done.returncode == 3 and "no CUDA device" in done.stderr


@pytest.mark.parametrize(
    ("spans", "share"),
    [
        ([], 1.0),
        ([(5, 9)], 0.0),
        ([(0, 4), (6, 10)], 0.2),
        ([(6, 10), (0, 4), (1, 2)], 0.2),
        ([(0, 6), (5, 10)], 0.0),
    ],
)
def test_idle_is_where_no_span_is_open(spans: list[tuple[float, float]], share: float) -> None:
    assert idle_share(spans) == pytest.approx(share)


def test_only_the_device_s_events_count(tmp_path: Path) -> None:
    events = [
        {"cat": "kernel", "ph": "X", "ts": 10, "dur": 5},
        {"cat": "cpu_op", "ph": "X", "ts": 0, "dur": 100},
        {"cat": "gpu_memcpy", "ph": "X", "ts": 20, "dur": 1},
        {"ph": "M", "name": "process_name"},
    ]
    (tmp_path / "trace.json").write_text(json.dumps({"traceEvents": events}))
    assert device_spans(tmp_path / "trace.json") == [(10, 15), (20, 21)]


def test_steps_are_summed_up_once() -> None:
    times = StepTimes()
    times.step(1, 0.0, 0.002)
    times.step(2, 0.003, 0.005)
    assert times.summary() == {
        "steps": 2,
        "step_us_median": pytest.approx(2000),
        "idle_share_between_steps": pytest.approx(0.2),
    }
    assert not times.spans


def test_other_greedy_ids_than_the_cpu_s_are_wrong(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Drawn ids, every second, may differ by rounding."""
    cpu = [[1, 2], [3, 4], [5, 6], [7, 8], [9, 9], [1, 1]]
    one_drawn, one_greedy = [[1, 2], [0, 0], *cpu[2:]], [*cpu[:4], [9, 8], [1, 1]]
    monkeypatch.setattr(gpu_check, "_written", lambda directory, *_: directory)
    equal = [cpu] * (len(gpu_check.OPTIONS) - 2)
    runs = iter([cpu, one_drawn, *equal, one_greedy])
    monkeypatch.setattr(gpu_check, "_outputs", lambda *_: next(runs))
    report = gpu_check.check_ids("cuda", gpu_check.QUICK, tmp_path)
    assert [check["differing"] for check in report["ids"]] == [[], *([] for _ in equal), [4]]
    assert report["ids"][0]["drawn_equal_share"] == pytest.approx(2 / 3)
    assert not report["passed"]
