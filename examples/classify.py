"""Few-shot classification: the examples are computed once for the whole batch, each label is scored by `select`."""

from __future__ import annotations

from model import chosen_model

import gapless
from gapless import ProgramState, select

LABELS = ("sport", "science", "politics", "cooking")
EXAMPLES = """\
Headline: The striker scored twice in the final
Topic: sport
Headline: Parliament votes on the new budget tonight
Topic: politics
Headline: Three sauces that every kitchen needs
Topic: cooking
Headline: Telescope finds water on a distant planet
Topic: science
"""
HEADLINES = (
    "Goalkeeper saves two penalties in the cup",
    "How to bake bread with a crisp crust",
    "The minister resigns after the election",
    "New particle seen in the collider",
)


@gapless.function
def classify(s: ProgramState, headline: str) -> str:
    s += EXAMPLES + f"Headline: {headline}\nTopic: "
    s += select("topic", LABELS)
    return str(s["topic"])


def main() -> None:
    states = classify.run_batch([{"headline": headline} for headline in HEADLINES])
    for headline, state in zip(HEADLINES, states, strict=True):
        print(f"{state.ret_value:10} {headline}")


if __name__ == "__main__":
    with chosen_model(__doc__):
        main()
