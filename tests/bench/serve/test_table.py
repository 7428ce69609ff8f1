"""The tables that a run ends with."""

from typing import Any

from gapless.bench.serve.goodput import Goodput
from gapless.bench.serve.metrics import DEFINITIONS, summarize
from gapless.bench.serve.record import Chunk, Record
from gapless.bench.serve.table import columns, sweep_table, table


def report(**changes: Any) -> dict[str, Any]:
    records = [
        Record(
            index=0, prompt_len=10, output_len=5, due=0.0, sent=0.0, chunks=[Chunk(1.0, 1), Chunk(1.5, 2)],
            ended=1.5, completion_tokens=3, prompt_tokens=12, cached_tokens=6, retokenized=4,
        ),
        Record(index=1, prompt_len=10, output_len=5, due=0.0, sent=0.25, error="503: busy"),
    ]  # fmt: skip
    return summarize(records, 2.0, Goodput(ttft=500, e2e=2000)) | changes


def lines(text: str) -> dict[str, list[str]]:
    """The cells of each line by its first word."""
    return {line.split()[0]: line.split()[1:] for line in text.splitlines() if line}


def test_every_figure_has_its_place() -> None:
    text = table(report(backend="gapless", request_rate=4.0, warnings=["a", "b"]))
    assert text.startswith(
        "backend gapless, request rate 4.0\nrequests       1 completed, 1 failed, 0 cut, - not sent, in 2.00 s\n"
    )
    assert "input tokens   12 (the client's count: 10), 6 from the cache: hit rate 0.50\n" in text
    assert "output tokens  3 of 5 asked, 4 retokenised; 1 early stops\n  1 failed: 503: busy\n" in text
    cells = lines(text)
    assert cells["request"] == ["throughput", "0.50", "requests/s"]
    assert cells["total"] == ["throughput", "7.50", "tokens/s"]
    assert (
        "goodput                    0.00 requests/s; 0.00 of the requests within ttft 500 ms, e2e 2000 ms"
        in text
    )
    head = text.index("       ms     mean   median")
    body = lines(text[head : text.index(DEFINITIONS)])
    assert body["ms"] == ["mean", "median", "std", "min", "p90", "p95", "p99", "max"]
    assert body["TTFT"] == ["1000.00", "1000.00", "0.00", *["1000.00"] * 5]
    assert body["TPOT"][0] == body["ITL"][0] == "250.00"
    assert body["chunk"][1] == "500.00"
    assert body["E2E"][0] == "1500.00"
    assert body["send"][:3] == ["lag", "125.00", "125.00"]
    assert text.endswith(f"{DEFINITIONS}\nwarning: a\nwarning: b")


def test_a_missing_figure_is_a_dash() -> None:
    text = table(summarize([], 1.0))
    assert "\n     TTFT     -" in text
    assert "- from the cache: hit rate -" in text
    assert not any(line.startswith("goodput") for line in text.splitlines())
    assert "requests       - completed" in table({})


def test_a_sweep_has_a_line_for_each_run_and_no_empty_columns() -> None:
    runs = [report(request_rate=rate, warnings=["same", str(rate)]) for rate in (1.0, 16.0)]
    head, *rows = sweep_table(runs).splitlines()
    assert head.split()[:3] == ["rate", "completed", "failed"]
    assert [row.split()[0] for row in rows[:2]] == ["1.00", "16.00"]
    assert rows[2:] == ["warning: same", "warning: 1.0", "warning: 16.0"]
    assert "limit" not in head


def test_columns_end_together() -> None:
    assert columns([["a", "bb"], ["ccc", "d"]]) == ["  a  bb", "ccc   d"]
