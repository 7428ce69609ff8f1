"""A loop of thought, action and observation, as in ReAct, with a function of this program as the tool.

The model chooses what to do by `select`, and `regex` keeps the tool's input to a form that the tool can read.
"""

from __future__ import annotations

import operator

from model import chosen_model

import gapless
from gapless import ProgramState, gen, gen_int, select

OPERATIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul}
EXAMPLE = """\
Question: A box holds 12 eggs. How many eggs are in 7 boxes?
Thought: I need 12 times 7.
Action: calculate
Input: 12 * 7
Observation: 84
Thought: Now I know it.
Action: answer
Answer: 84

"""
QUESTION = "A train has 9 coaches with 48 seats each. How many seats are there?"


def calculate(expression: str) -> int:
    left, operation, right = expression.split()
    return int(OPERATIONS[operation](int(left), int(right)))


@gapless.function
def answer(s: ProgramState, question: str, max_steps: int = 4) -> int:
    s += EXAMPLE + f"Question: {question}\n"
    for _ in range(max_steps):
        s += "Thought:" + gen("thought", max_tokens=32, stop="\n") + "\n"
        s += "Action: " + select("action", ["calculate", "answer"]) + "\n"
        if s["action"] == "answer":
            break
        s += "Input: " + gen("input", max_tokens=16, regex="[0-9]{1,4} [-+*] [0-9]{1,4}") + "\n"
        s += f"Observation: {calculate(s['input'])}\n"
    s += "Answer: " + gen_int("answer", max_tokens=8)
    return int(s["answer"])


def main() -> None:
    state = answer.run(QUESTION, temperature=0)
    print(state.text().removeprefix(EXAMPLE))


if __name__ == "__main__":
    with chosen_model(__doc__):
        main()
