"""A conversation of several turns, its text shown as it comes.

Each answer begins where the last one ended: all that was said before is in the prefix cache.
"""

from __future__ import annotations

from collections.abc import Sequence

from model import chosen_model

import gapless
from gapless import ProgramState, assistant, gen, system, user

QUESTIONS = ("What is the capital of France?", "Which river flows through it?", "Where does that river end?")


@gapless.function
def chat(s: ProgramState, questions: Sequence[str]) -> None:
    s += system("You answer in one short sentence.")
    for number, question in enumerate(questions):
        s += user(question)
        s += assistant(gen(f"answer{number}", max_tokens=32, stop="\n"))


def main() -> None:
    state = chat.run(QUESTIONS, stream=True, temperature=0)
    for piece in state.text_iter():
        print(piece, end="", flush=True)
    print(f"\n{len(state.messages())} turns")


if __name__ == "__main__":
    with chosen_model(__doc__):
        main()
