"""Three workloads, each as a program and as the plain calls of /generate that do the same, one after the other.

Texts are random words, so that prompts are new in each run; answers are greedy and of a fixed length, so that both ways
ask the model for the same work.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

import gapless
from gapless import ProgramState, gen, select
from gapless.bench.program_models import Model

LABELS = ("sport", "science", "politics", "cooking")
_WORDS = (
    "air animal answer arm art baby back ball bank bed bird blood blue board boat body bone book box boy bread "
    "bridge brother building business car care cause cell chair chance child city class clock cloud coat coffee "
    "color corner country course cow cup dance day death desk dinner doctor dog door dream dress drink earth east "
    "edge effect egg end energy event eye face fact family farm father field fire fish floor flower food foot "
    "force forest friend front fruit game garden girl glass gold grass green ground group hair half hand hat head "
    "heart heat hill history home horse hospital hour house ice idea iron island job king kitchen lake land law "
    "leaf leg letter level light line list love machine man map market milk mind minute money month moon morning "
    "mother mountain mouth music name nature neck night north nose number ocean office oil page paint pair paper "
    "park part party peace pen picture piece place plan plane plant plate point power price problem queen question "
    "rain reason red rice ring river road rock room root rule salt sand school sea season seat ship shoe shop "
    "silver sister size skin sky sleep snow song south space sport spring star state station stone street student "
    "sugar summer sun table tail tea test tree trip truth town voice wall war water way week west wheel wife wind "
    "window wine winter woman wood word world year"
)


@dataclass(frozen=True)
class Workload:
    """`program` and `plain` do all of it once and give what came out: their answers can be compared.

    `scale`: how many times the work would have to be done for the whole of it.
    """

    name: str
    program: Callable[[Model], list[Any]]
    plain: Callable[[Model], list[Any]]
    scale: float = 1.0


def words(random: np.random.Generator, count: int) -> str:
    return " ".join(random.choice(_WORDS.split(), count))


def fixed(tokens: int) -> dict[str, Any]:
    """Sampling parameters of an answer of this length."""
    return {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True}


# ------------------------------------------------------------ few-shot classification


@gapless.function
def classify(s: ProgramState, shots: str, headline: str) -> None:
    s += shots + f"Headline: {headline}\nTopic:\n" + select("topic", LABELS)


def few_shot(
    seed: int, count: Callable[[str], int], questions: int, shared_len: int, scale: float = 1.0
) -> Workload:
    """`questions` share a prompt of at least `shared_len` tokens, by `count`; each is a select of four labels.

    The plain calls score one label each, by the log probabilities of its tokens.
    """
    random = np.random.default_rng(seed)
    shots = ""
    while count(shots) < shared_len:
        shots += f"Headline: {words(random, 8)}\nTopic:\n{random.choice(LABELS)}\n"
    headlines = [words(random, 8) for _ in range(questions)]

    def program(model: Model) -> list[Any]:
        items = [{"shots": shots, "headline": headline} for headline in headlines]
        return [state["topic"] for state in classify.run_batch(items, backend=model.backend)]

    def score(model: Model, prompt: str, start: int, label: str) -> float:
        answer = model.call(
            prompt + label, {"max_new_tokens": 0}, return_logprob=True, logprob_start_len=start - 1
        )
        return statistics.fmean(entry[0] for entry in answer["meta_info"]["input_token_logprobs"][1:])

    def plain(model: Model) -> list[Any]:
        topics = []
        for headline in headlines:
            prompt = shots + f"Headline: {headline}\nTopic:\n"
            start = model.count(prompt)
            scores = [score(model, prompt, start, label) for label in LABELS]
            topics.append(LABELS[scores.index(max(scores))])
        return topics

    return Workload("few-shot", program, plain, scale)


# ------------------------------------------------------------ tree of thought


@gapless.function
def think(s: ProgramState, problem: str, branches: int, depth: int, output_len: int) -> list[Any]:
    """Every thought is followed by `branches` others, down to `depth`."""
    s += problem
    level, thoughts = [s], []
    for number in range(1, depth + 1):
        level = [child for state in level for child in _branched(state, branches, number, output_len)]
        thoughts += level
    return [state["thought"] for state in thoughts]


def _branched(state: ProgramState, branches: int, number: int, output_len: int) -> Sequence[ProgramState]:
    forks = state.fork(branches)
    forks += lambda i: _lead(number, i)
    forks += gen("thought", **fixed(output_len))
    return list(forks)


def _lead(number: int, i: int) -> str:
    return f"\nStep {number}, idea {i + 1}:"


def tree(seed: int, trees: int, problem_len: int, branches: int, depth: int, output_len: int) -> Workload:
    random = np.random.default_rng(seed)
    problems = [f"Problem: {words(random, problem_len)}" for _ in range(trees)]

    def program(model: Model) -> list[Any]:
        sizes = {"branches": branches, "depth": depth, "output_len": output_len}
        items = [{"problem": problem, **sizes} for problem in problems]
        return [t for state in think.run_batch(items, backend=model.backend) for t in state.ret_value]

    def plain(model: Model) -> list[Any]:
        answers = []
        for problem in problems:
            level = [problem]
            for number in range(1, depth + 1):
                prompts = [text + _lead(number, i) for text in level for i in range(branches)]
                thoughts = [model.call(prompt, fixed(output_len))["text"] for prompt in prompts]
                level = [prompt + thought for prompt, thought in zip(prompts, thoughts, strict=True)]
                answers += thoughts
        return answers

    return Workload("tree-of-thought", program, plain)


# ------------------------------------------------------------ conversations


@gapless.function
def talk(s: ProgramState, system: str, questions: Sequence[str], output_len: int) -> list[Any]:
    s += system
    for turn, question in enumerate(questions):
        s += _turn(question) + gen(f"answer{turn}", **fixed(output_len))
    return [s[f"answer{turn}"] for turn in range(len(questions))]


def _turn(question: str) -> str:
    return f"\nUser: {question}\nAssistant:"


def multi_turn(
    seed: int, users: int, turns: int, system_len: int, question_len: int, output_len: int
) -> Workload:
    random = np.random.default_rng(seed)
    system = words(random, system_len)
    talks = [[words(random, question_len) for _ in range(turns)] for _ in range(users)]

    def program(model: Model) -> list[Any]:
        items = [{"system": system, "questions": asked, "output_len": output_len} for asked in talks]
        return [text for state in talk.run_batch(items, backend=model.backend) for text in state.ret_value]

    def plain(model: Model) -> list[Any]:
        answers = []
        for asked in talks:
            text = system
            for question in asked:
                text += _turn(question)
                answers.append(model.call(text, fixed(output_len))["text"])
                text += answers[-1]
        return answers

    return Workload("multi-turn", program, plain)
