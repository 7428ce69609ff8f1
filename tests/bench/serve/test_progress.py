"""The progress line: what it says, and when."""

import io
import math

import pytest

from gapless.bench.serve.progress import Progress
from gapless.bench.serve.record import Record


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def ended(**changes: object) -> Record:
    return Record(index=0, prompt_len=1, output_len=1, due=0.0, sent=0.0, **changes)


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_a_terminal_has_one_line_that_is_written_over(clock: Clock) -> None:
    stream = Terminal()
    progress = Progress(10, stream=stream, clock=clock)
    for _ in range(4):
        progress.started()
    progress.chunk(30)
    progress.chunk(10)
    progress.finished(ended())
    progress.finished(ended(error="lost"))
    progress.tick(102.0)
    progress.tick(102.1)
    clock.now = 180.0
    progress.close()
    first, second = stream.getvalue().split("\r\x1b[K")[1:]
    assert first == "2/10 done, 2 running, 1 failed, 20 tokens/s, 0:02 gone, 0:08 left"
    assert second == "2/10 done, 2 running, 1 failed, 0 tokens/s, 1:20 gone, 5:20 left\n"


def test_a_line_is_no_wider_than_the_terminal(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "21")
    stream = Terminal()
    Progress(10, stream=stream, clock=clock).tick(101.0)
    assert stream.getvalue() == "\r\x1b[K0/10 done, 0 running"


def test_a_file_gets_a_line_in_ten_seconds(clock: Clock) -> None:
    stream = io.StringIO()
    progress = Progress(10, stream=stream, clock=clock)
    for tenth in range(251):
        progress.chunk(3)
        progress.tick(100 + tenth / 10)
    lines = stream.getvalue().splitlines()
    assert [line.split(", ")[3:5] for line in lines] == [
        ["30 tokens/s", "0:10 gone"],
        ["30 tokens/s", "0:20 gone"],
    ]
    progress.close()
    assert len(stream.getvalue().splitlines()) == 3


def test_the_rate_is_of_late(clock: Clock) -> None:
    stream = Terminal()
    progress = Progress(1, stream=stream, clock=clock)
    progress.chunk(1000)
    for second in range(1, 21):
        progress.chunk(7)
        progress.tick(100.0 + second)
    assert " 7 tokens/s" in stream.getvalue().split("\r")[-1]


def test_the_end_is_where_the_time_is_up_if_not_before(clock: Clock) -> None:
    def left(done: int, duration: float) -> str:
        stream = Terminal()
        progress = Progress(4, duration, stream=stream, clock=clock)
        for _ in range(done):
            progress.finished(ended(cut=True))
        progress.tick(106.0)
        return stream.getvalue().split(", ")[-1]

    assert left(0, math.inf) == "- left"
    assert left(0, 10.0) == "0:04 left"
    assert left(2, 10.0) == "0:04 left"
    assert left(2, 99.0) == "0:06 left"
    assert left(4, 10.0) == left(0, 5.0) == "0:00 left"


def test_it_can_be_off(clock: Clock) -> None:
    stream = Terminal()
    progress = Progress(4, enabled=False, stream=stream, clock=clock)
    progress.started()
    progress.tick(999.0)
    progress.close()
    assert stream.getvalue() == ""
