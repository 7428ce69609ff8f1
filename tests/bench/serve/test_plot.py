"""Plots: that they are files of the right kind which load nothing, whatever the runs were like."""

import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gapless.bench.serve import plot
from gapless.bench.serve.metrics import summarize
from gapless.bench.serve.plot import Run, check_plot, write_plot
from gapless.bench.serve.record import Chunk, Record
from gapless.runtime.core.errors import ConfigError

PNG = b"\x89PNG\r\n\x1a\n"


def record(*times: float, sent: float = 0.0, **changes: Any) -> Record:
    chunks = [Chunk(at, 2) for at in times]
    fields = {"index": 0, "prompt_len": 1, "output_len": 2 * len(times), "due": sent, "sent": sent}
    ended = times[-1] if times else sent
    return Record(chunks=chunks, **fields | {"ended": ended, "completion_tokens": 2 * len(times)} | changes)


def run(label: str = "a", records: list[Record] | None = None, **changes: Any) -> Run:
    if records is None:
        records = [record(1.0, 2.0), record(1.5, 4.0, sent=1.0), record(3.0, ended=5.0, cut=True)]
    return Run(label, summarize(records, 5.0) | changes, records)


def test_a_page_shows_all_and_loads_nothing(tmp_path: Path) -> None:
    path = tmp_path / "out.html"
    write_plot(path, [run("one <b>", request_rate=1), run("two", request_rate=2)])
    page = path.read_text()
    assert page.startswith("<!doctype html>")
    assert page.count("<svg") == 1
    for title in (
        "TTFT",
        "TPOT",
        "E2E",
        "batch composition, two",
        "TTFT against requests/s",
        "one &lt;b&gt;",
    ):
        assert title in page
    assert "<b>" not in page
    assert page.count("completed, 0 failed") == 2
    links = re.findall(r"""(?:src|href)="([^"]*)|url\(([^)]*)""", page)
    assert links
    assert all((a or b).startswith("#") for a, b in links)
    assert "@import" not in page
    assert "<script" not in page


def test_a_picture_of_any_runs(tmp_path: Path) -> None:
    runs = {
        "none": run(records=[]),
        "failed": run(records=[record(error="lost")]),
        "one": run(records=[record(1.0)]),
        "samples": Run("s", run().report, run().records, [{"at": 0.0, "running": 1, "waiting": 2}]),
        "tokens": Run("s", run().report, [], [{"at": 0.0, "running": 1, "waiting": 2, "used_tokens": 3}]),
    }
    for name, each in runs.items():
        path = tmp_path / f"{name}.png"
        write_plot(path, [each])
        assert path.read_bytes().startswith(PNG)


def test_the_load_of_a_sweep_is_what_differs() -> None:
    slow, fast = (run(request_rate=rate, max_concurrency=8).report for rate in (1, 2.5))
    endless = run(request_rate="inf", max_concurrency=16).report
    failed = run(records=[], request_rate=4).report
    assert plot._loads([fast, slow, failed]) == ("requests/s", [(1.0, slow), (2.5, fast)])
    assert plot._loads([slow, endless]) == ("concurrent requests", [(8.0, slow), (16.0, endless)])
    assert plot._loads([slow, slow]) is plot._loads([slow]) is plot._loads([run().report]) is None


def test_requests_wait_until_their_first_token_and_run_until_their_end() -> None:
    records = [record(1.0, 3.0), record(2.0, ended=5.0, cut=True), record(sent=2.5, ended=4.0, error="lost")]
    waiting, running = plot._running(records, np.array([0.5, 1.5, 2.75, 4.5, 5.0]))
    assert waiting.tolist() == [2, 1, 1, 0, 0]
    assert running.tolist() == [0, 1, 2, 1, 0]


def test_what_cannot_be_written_is_said_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_plot(tmp_path / "a.html")
    check_plot(tmp_path / "a.png")
    with pytest.raises(ConfigError, match=r"a\.pdf: the name must end in \.html or \.png"):
        check_plot(tmp_path / "a.pdf")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match=r"matplotlib is missing; pip install 'gapless\[plot\]'"):
        check_plot(tmp_path / "a.png")
