"""Tree of thought: at each level several next steps are written and judged at the same time, the best one goes on.

A fork's text is its parent's, computed once. What a judge says is written in a copy: the steps go on without it.
"""

from __future__ import annotations

from model import chosen_model

import gapless
from gapless import ProgramState, gen, select

PROBLEM = """\
A farmer has 15 sheep, buys 8 more, and sells half of the rest after giving 3 away. How many sheep are left?
Solve it step by step, one short line a step.
"""


def judge(step: ProgramState) -> ProgramState:
    """A copy of the state in which its last line is judged."""
    judged = step.copy()
    judged += "(This step is " + select("verdict", ["right", "wrong"]) + ")"
    return judged


def margin(judged: ProgramState) -> float:
    """By how much right is likelier than wrong."""
    right, wrong = judged.get_meta_info("verdict")["scores"]
    return float(right - wrong)


@gapless.function
def solve(s: ProgramState, problem: str, branches: int = 3, depth: int = 3) -> list[tuple[float, str]]:
    """The steps taken, each with its score."""
    s += problem
    path, best = [], s
    for level in range(1, depth + 1):
        steps = best.fork(branches)
        steps += f"Step {level}:"
        steps += lambda i: gen("step", max_tokens=24, stop="\n", temperature=0.8, sampling_seed=i + 1)
        steps += "\n"
        judges = [judge(step) for step in steps]  # all of them are at work before the first one is read
        scores = [margin(judged) for judged in judges]
        chosen = max(range(branches), key=scores.__getitem__)
        best = steps[chosen]
        path.append((scores[chosen], str(best["step"])))
    best += "Answer:" + gen("answer", max_tokens=8, stop="\n")
    s["answer"] = best["answer"]
    return path


def main() -> None:
    state = solve.run(PROBLEM, temperature=0)
    for level, (score, step) in enumerate(state.ret_value, start=1):
        print(f"step {level} ({score:+.2f}):{step}")
    print(f"answer:{state['answer']}")


if __name__ == "__main__":
    with chosen_model(__doc__):
        main()
