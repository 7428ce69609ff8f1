"""The trace can be read at any time, whatever becomes of the process."""

import json

import pytest

from gapless.runtime.core.errors import ConfigError
from gapless.runtime.core.trace import Trace


def test_the_file_is_whole_after_each_flush_and_holds_both_tracks(tmp_path):
    path = tmp_path / "trace.json"
    trace = Trace(path)
    trace.phase("plan", 10.0, 10.001)
    trace.flush()
    assert [event["ph"] for event in json.loads(path.read_text())] == ["M", "M", "X"]
    trace.step(1, 10.001, 10.003)
    trace.phase("send", 10.003, 10.004)
    trace.close()
    spans = [event for event in json.loads(path.read_text()) if event["ph"] == "X"]
    assert [(span["name"], span["tid"], span["dur"]) for span in spans] == [
        ("plan", 1, 1000.0),
        ("step 1", 2, 2000.0),
        ("send", 1, 1000.0),
    ]
    assert spans[1]["ts"] - spans[0]["ts"] == 1000.0


def test_a_place_that_cannot_be_written_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"--trace .*nowhere"):
        Trace(tmp_path / "nowhere" / "trace.json")
