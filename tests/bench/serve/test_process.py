"""`gapless bench serve` as people start it: a process with exit codes, a table on stdout, progress on stderr."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from scripted_server import scripted_server

BENCH = [sys.executable, "-P", "-m", "gapless.runtime.cli", "bench", "serve", "--tokenizer", "toy"]
WAIT = 60


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with scripted_server() as url:
        yield url


@pytest.fixture(autouse=True)
def interrupts() -> Iterator[None]:
    """A process inherits an ignored SIGINT, as the tests do where they run in a shell's background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def bench(url: str, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*BENCH, "--base-url", url, "--num-prompts", "3", *options],
        capture_output=True,
        text=True,
        timeout=WAIT,
        check=False,
    )


def test_a_run(url: str, tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    ended = bench(url, "--output-file", str(file))
    assert ended.returncode == 0
    assert "requests       3 completed, 0 failed, 0 cut, 0 not sent" in ended.stdout
    assert ended.stderr.splitlines()[-1].startswith("3/3 done, 0 running, 0 failed")
    assert "\x1b" not in ended.stderr
    assert json.loads(file.read_text().removesuffix("\n"))["completed"] == 3


def test_all_requests_fail() -> None:
    with scripted_server([{}, {"status": 503}, {"status": 503}, {"status": 503}, {"status": 503}]) as busy:
        ended = bench(busy)
    assert ended.returncode == 1
    assert "  3 failed: 503 as scripted" in ended.stdout
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (["--request-rate", "0"], 2, "--request-rate"),
        (["--num-prompts", "x"], 2, "--num-prompts"),
        (["--output-file", "/nowhere/x.json"], 2, "/nowhere"),
        (["--base-url", "http://127.0.0.1:9"], 1, "does not answer"),
    ],
)
def test_errors_are_one_line(url: str, options: list[str], code: int, message: str) -> None:
    ended = bench(url, *options)
    assert (ended.returncode, ended.stdout) == (code, "")
    assert len(ended.stderr.splitlines()) == 1 and message in ended.stderr


def test_ctrl_c_keeps_the_runs_that_are_over_and_closes_the_connections(tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    hanging = {"chunks": [[0.0, 1]], "hang": True}
    options = ["--num-prompts", "1", "--warmup-requests", "0", "--sweep", "max-concurrency=1,2"]
    deadline = time.monotonic() + WAIT
    with (
        scripted_server([{}, {}, hanging]) as url,
        subprocess.Popen(
            [*BENCH, "--base-url", url, *options, "--output-file", str(file)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as process,
    ):
        try:
            while len(log(url)) < 3:
                assert process.poll() is None and time.monotonic() < deadline
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=WAIT)
        finally:
            process.kill()
        while log(url)[-1]["gone"] is None:
            assert time.monotonic() < deadline
    assert process.returncode == 130
    assert "Traceback" not in err
    header, row = (line.split() for line in out.splitlines() if not line.startswith("warning"))
    assert dict(zip(header, row, strict=False))["limit"] == "1"
    assert [point["max_concurrency"] for point in json.loads(file.read_text())["points"]] == [1]


def log(url: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = httpx.get(f"{url}/log").json()
    return found
