"""When requests are due: properties of the schedule, and which options are refused."""

import argparse
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gapless.bench.serve.arrivals import RampUp, add_arguments, check, due_times, ramp_up_from, schedule
from gapless.bench.serve.record import Item
from gapless.runtime.core.errors import ConfigError

SEEDS = st.integers(0, 2**32)
RATES = st.floats(0.01, 1e4)
BURSTINESS = st.floats(0.01, 1e4) | st.just(math.inf)


def options(*arguments):
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser.parse_args(arguments)


@st.composite
def ramps(draw):
    low, high = sorted(draw(st.tuples(RATES, RATES)))
    return RampUp(draw(st.sampled_from(["linear", "exponential"])), low, high)


@given(st.integers(0, 50), RATES, BURSTINESS, st.none() | ramps(), SEEDS)
def test_times_begin_at_zero_never_fall_and_follow_from_the_seed(count, rate, burstiness, ramp_up, seed):
    def times():
        return schedule(count, rate=rate, burstiness=burstiness, ramp_up=ramp_up, seed=seed)

    due = times()
    assert due.shape == (count,) and np.isfinite(due).all()
    assert (due[:1] == 0).all() and (np.diff(due) >= 0).all()
    assert (due == times()).all()


def test_another_seed_gives_other_times():
    assert (schedule(9, rate=1, seed=1)[1:] != schedule(9, rate=1, seed=2)[1:]).all()


@given(SEEDS, BURSTINESS)
def test_an_infinite_rate_sends_all_at_once(seed, burstiness):
    assert not schedule(20, rate=math.inf, burstiness=burstiness, seed=seed).any()


@given(SEEDS, RATES, BURSTINESS)
def test_the_rate_only_sets_the_scale(seed, rate, burstiness):
    at_one = schedule(20, rate=1, burstiness=burstiness, seed=seed)
    assert schedule(20, rate=rate, burstiness=burstiness, seed=seed) == pytest.approx(at_one / rate)


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_gaps_have_the_mean_and_the_spread_of_a_gamma_distribution(burstiness):
    """Of 40,000 gaps both are known to better than 2 %, by four standard errors of the widest."""
    gaps = np.diff(schedule(40_001, rate=50, burstiness=burstiness, seed=7))
    assert gaps.mean() == pytest.approx(1 / 50, rel=0.04)
    assert gaps.std() / gaps.mean() == pytest.approx(burstiness**-0.5, rel=0.04)


def test_poisson_gaps_are_exponential():
    gaps = np.diff(schedule(40_001, rate=1, seed=3))
    for share in (0.1, 0.5, 0.9, 0.99):
        assert (gaps > -math.log(1 - share)).mean() == pytest.approx(1 - share, abs=0.01)


def test_infinite_burstiness_is_regular():
    due = schedule(5, rate=4, burstiness=math.inf, seed=0)
    assert due.tolist() == [0, 0.25, 0.5, 0.75, 1.0]


@given(ramps(), st.integers(3, 50))
def test_the_rate_of_a_ramp_rises_to_its_end(ramp_up, count):
    """Regular arrivals show it: each gap is the inverse of the rate at that time."""
    rates = 1 / np.diff(schedule(count, rate=math.inf, burstiness=math.inf, ramp_up=ramp_up, seed=0))
    progress = np.arange(1, count) / (count - 1)
    stated = {
        "linear": ramp_up.start + (ramp_up.end - ramp_up.start) * progress,
        "exponential": ramp_up.start * (ramp_up.end / ramp_up.start) ** progress,
    }
    # A gap is the difference of two times, which may be much larger than it.
    assert rates == pytest.approx(stated[ramp_up.strategy], rel=1e-6)
    assert rates[-1] == pytest.approx(ramp_up.end, rel=1e-6)


def test_a_linear_ramp_may_begin_at_rest():
    due = schedule(5, rate=math.inf, burstiness=math.inf, ramp_up=RampUp("linear", 0, 4), seed=0)
    assert due == pytest.approx([0, 1, 1 + 1 / 2, 1 + 1 / 2 + 1 / 3, 1 + 1 / 2 + 1 / 3 + 1 / 4])


def test_only_items_without_a_time_of_their_own_are_scheduled():
    items = [Item([1], 1, 1, at=at, after=after) for at, after in ((None, None), (7.5, None), (None, 0))]
    due = due_times([*items, items[0]], rate=2, burstiness=math.inf, seed=0)
    assert due[[0, 1, 3]].tolist() == [0, 7.5, 0.5] and math.isnan(due[2])


def test_defaults_are_right():
    parsed = options()
    check(parsed)
    assert (parsed.request_rate, parsed.burstiness, ramp_up_from(parsed)) == (math.inf, 1.0, None)


def test_a_ramp_comes_from_its_options():
    parsed = options("--ramp-up-strategy=exponential", "--ramp-up-start-rps=1", "--ramp-up-end-rps=8")
    check(parsed)
    assert ramp_up_from(parsed) == RampUp("exponential", 1, 8)


LINEAR, START, END = "--ramp-up-strategy=linear", "--ramp-up-start-rps", "--ramp-up-end-rps"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--request-rate=0"], "--request-rate 0: must be above 0"),
        (["--request-rate=nan"], "--request-rate nan: must be above 0"),
        (["--burstiness=-1"], "--burstiness -1: must be above 0"),
        (["--max-concurrency=0"], "--max-concurrency 0: must be at least 1"),
        (["--duration=0"], "--duration 0: must be above 0"),
        (["--duration=inf"], "--duration inf: must be above 0 and finite"),
        (["--warmup-requests=-1"], "--warmup-requests -1: must be at least 0"),
        ([f"{START}=1"], "need --ramp-up-strategy"),
        ([LINEAR, f"{START}=1"], "--ramp-up-strategy needs"),
        ([LINEAR, f"{START}=1", f"{END}=2", "--request-rate=3"], "both set the rate"),
        ([LINEAR, f"{START}=2", f"{END}=1"], "must not fall"),
        ([LINEAR, f"{START}=0", f"{END}=0"], "end above 0"),
        ([LINEAR, f"{START}=nan", f"{END}=1"], "must not fall"),
        ([LINEAR, f"{START}=1", f"{END}=inf"], "must not fall"),
        (["--ramp-up-strategy=exponential", f"{START}=0", f"{END}=1"], "must start above 0"),
    ],
)
def test_wrong_options_are_named(arguments, message):
    with pytest.raises(ConfigError, match=message):
        check(options(*arguments))
