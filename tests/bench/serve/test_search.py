"""The search for the highest rate, on servers that are a function."""

from __future__ import annotations

import asyncio
import math

from gapless.bench.serve.search import MAX_RUNS, Figures, Found, find_max_rate


def search(limit: float, capacity: float, seconds: float = 100.0) -> Found:
    """A server that does `capacity` requests/s, each in `seconds`, and keeps its limits up to the rate `limit`."""

    async def measure(rate: float) -> Figures:
        done = min(rate, capacity)
        share = 1.0 if rate <= limit else 0.9
        return {"request_throughput": done, "goodput_share": share, "concurrency": done * seconds}

    return asyncio.run(find_max_rate(measure, 0.95))


def test_the_limit_is_found_below_what_the_server_can_do() -> None:
    for limit in (0.7, 3.1, 9.9):
        found = search(limit, 10.0)
        assert 0.94 * limit <= found.rate <= limit
        assert len(found.runs) <= MAX_RUNS


def test_and_above_it_where_short_loads_hold() -> None:
    assert 0.94 * 25 <= search(25.0, 10.0).rate <= 25


def test_a_server_that_holds_whatever_comes_has_no_limit() -> None:
    found = search(math.inf, 10.0)
    assert (found.rate, len(found.runs)) == (math.inf, 1)


def test_a_server_that_never_holds_has_rate_0() -> None:
    found = search(-1.0, 10.0)
    assert (found.rate, len(found.runs)) == (0.0, MAX_RUNS)
    assert search(-1.0, 0.0).rate == 0.0


def test_the_search_ends_where_requests_hardly_meet() -> None:
    """A slower rate would take longer and longer to say the same."""
    found = search(-1.0, 8.0, seconds=0.1)
    assert (found.rate, [run["request_throughput"] for run in found.runs]) == (0.0, [8.0, 8.0, 4.0, 2.0])


def test_a_run_without_answers_does_not_hold() -> None:
    async def measure(rate: float) -> Figures:
        return {
            "request_throughput": 1.0 if math.isinf(rate) else 0.0,
            "goodput_share": None,
            "concurrency": 1.0,
        }

    assert asyncio.run(find_max_rate(measure, 0.95)).rate == 0.0
