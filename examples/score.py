"""Batch scoring: how sure the model is, from the log probabilities behind a `select`. Items fail one by one."""

from __future__ import annotations

import math

from model import chosen_model

import gapless
from gapless import ProgramState, select

EXAMPLES = """\
Review: I would buy it again at once.
Verdict: good
Review: It broke on the second day.
Verdict: bad
"""
REVIEWS = (
    "Best purchase of the year.",
    "A waste of money.",
    "It does what it should, and it looks nice.",
    "",
)


@gapless.function
def rate(s: ProgramState, review: str) -> float:
    """The probability that it is good, if it is either."""
    if not review:
        raise ValueError("an empty review")
    s += EXAMPLES + f"Review: {review}\nVerdict: " + select("verdict", ["good", "bad"])
    good, bad = s.get_meta_info("verdict")["scores"]
    return 1 / (1 + math.exp(bad - good))


def main() -> None:
    states = rate.run_batch([{"review": review} for review in REVIEWS])
    for review, state in zip(REVIEWS, states, strict=True):
        print(f"failed: {error}" if (error := state.error()) else f"{state.ret_value:.3f}  {review}")


if __name__ == "__main__":
    with chosen_model(__doc__):
        main()
