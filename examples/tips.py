"""Parallel tips: a list is outlined, then each of its points is written out at the same time by a fork of its own."""

from __future__ import annotations

from model import chosen_model

import gapless
from gapless import ProgramState, gen

TIPS = ("Sleep enough.", "Move every day.", "Eat vegetables.")


@gapless.function
def advise(s: ProgramState, subject: str) -> None:
    s += f"Three tips for {subject}:\n"
    s += "".join(f"{number}. {tip}\n" for number, tip in enumerate(TIPS, start=1))
    with s.fork(len(TIPS)) as forks:
        forks += lambda i: f"\nTip {i + 1} in more words: {TIPS[i].removesuffix('.')},"
        forks += gen("detail", max_tokens=32, stop="\n")
    # The block's end joins the forks: what each of them calls `detail` is a list here.
    for tip, detail in zip(TIPS, s["detail"], strict=True):
        s += f"\n- {tip}{detail}"
    s += "\nIn summary," + gen("summary", max_tokens=32, stop="\n")


def main() -> None:
    state = advise.run("a healthy life", temperature=0)
    for tip, detail in zip(TIPS, state["detail"], strict=True):
        print(f"- {tip}{detail}")
    print(f"In summary,{state['summary']}")


if __name__ == "__main__":
    with chosen_model(__doc__):
        main()
