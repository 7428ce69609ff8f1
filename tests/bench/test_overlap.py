"""`gapless bench overlap`: both schedules on one device. No timing."""

import json

import pytest

from gapless.bench.overlap import StepTimes
from gapless.runtime.cli import main


def test_both_schedules_are_reported(tmp_path, capsys):
    path = tmp_path / "report.json"
    options = ["--model-path=toy", "--num-prompts=3", "--random-output-len=8", "--repeat=2", f"--json={path}"]
    assert main(["bench", "overlap", *options]) == 0
    report = json.loads(path.read_text())
    for name in ("synchronous", "overlapped"):
        assert report[name]["step_ms"] > 0 <= report[name]["gap_ms"]
    assert "toy model" in report["device"] and "synchronous" in capsys.readouterr().out


def test_lengths_and_gaps_are_of_the_last_steps():
    times = StepTimes()
    for number, span in enumerate([(0, 50), (60, 61), (63, 65), (70, 73)], 1):
        times.step(number, *span)
    assert times.decode(3) == (2, 5)


def test_a_wrong_option_is_named(capsys):
    with pytest.raises(SystemExit) as exit:
        main(["bench", "overlap", "--random-output-len=7"])
    assert exit.value.code == 2 and "--random-output-len: must be at least 8" in capsys.readouterr().err
