"""Workloads that share prefixes, and the best hit rate that any cache could reach on them.

A workload is a list of calls with fixed ids: the answers are part of it, so that what later prompts contain does not
depend on the schedule. Its sizes are those of a busy server made small: fewer clients who wait for a shorter time, so
that still several requests wait for each one that runs. Lengths vary from call to call, as they do in practice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from gapless.bench.random_ids import Ids, RandomIds

VOCABULARY = 32_000
PRIORITIES = 3
SPREAD = 0.5  # of the logarithm of a length
LEAST = 4  # tokens


@dataclass(frozen=True, eq=False)
class Call:
    """One request, and what will be answered.

    It arrives `delay` seconds after the answer to call number `after` is there, or after the start where that is -1.
    """

    prompt: Ids
    answer: Ids
    after: int
    delay: float
    priority: int

    @property
    def text(self) -> Ids:
        return np.concatenate([self.prompt, self.answer])


@dataclass(frozen=True)
class Best:
    """What an unlimited cache does with calls that come one after the other."""

    prompt_tokens: int
    cached_tokens: int
    pages: int  # whole ones, of distinct content

    @property
    def hit_rate(self) -> float:
        return self.cached_tokens / self.prompt_tokens


def best_possible(calls: Sequence[Call], page_size: int) -> Best:
    """The offline oracle: unlimited memory, each distinct prefix computed once.

    The rules of a real cache hold for it: prefixes are whole pages, of a prompt at least one token is computed, and the
    newest token of an answer has no KV. A call must stand behind those whose answers it contains.
    """
    pages: dict[tuple[int, bytes], int] = {}  # (number of the page before, ids): number from 1
    prompt_tokens = cached_tokens = 0
    for call in calls:
        text, page = call.text, 0
        matchable = (len(call.prompt) - 1) // page_size
        kept = (len(text) - 1) // page_size
        known = len(pages)
        for index in range(kept):
            key = (page, text[index * page_size : (index + 1) * page_size].tobytes())
            page = pages.setdefault(key, len(pages) + 1)
            cached_tokens += page_size * (index < matchable and page <= known)
        prompt_tokens += len(call.prompt)
    return Best(prompt_tokens, cached_tokens, len(pages))


def multi_turn(
    seed: int, *, users: int = 96, turns: int = 4, text_len: int = 48, answer_len: int = 72
) -> list[Call]:
    """Conversations: a prompt is all that was said before and the user's new text.

    All begin with one system prompt of 128 tokens. Users come in four bursts, 1 s apart, have 2 to 2 * turns - 2 turns
    and answer after 0.5 s, exponentially distributed.
    """
    random = _Random(seed)
    system, calls = random.ids(128), list[Call]()
    for user in range(users):
        history, after, delay = system, -1, 1.0 * (user * 4 // users)
        priority = random.priority()
        for _ in range(random.between(2, 2 * turns - 2)):
            prompt = np.concatenate([history, random.text(text_len)])
            calls.append(Call(prompt, random.text(answer_len), after, delay, priority))
            history, after, delay = calls[-1].text, len(calls) - 1, random.seconds(0.5)
    return calls


def few_shot(
    seed: int,
    *,
    tasks: int = 24,
    questions: int = 16,
    examples_len: int = 768,
    question_len: int = 64,
    answer_len: int = 8,
) -> list[Call]:
    """Questions that follow the examples of their task, shuffled and sent at once.

    As an evaluation like MMLU hands them to an engine (Hendrycks et al. 2021: 57 subjects, five examples each, short
    answers).
    """
    random = _Random(seed)
    examples = [(random.text(examples_len), random.priority()) for _ in range(tasks)]
    calls = list[Call]()
    for number in random.shuffled(tasks * questions):
        prefix, priority = examples[number % tasks]
        prompt = np.concatenate([prefix, random.text(question_len)])
        calls.append(Call(prompt, random.text(answer_len), -1, 0.0, priority))
    return calls


def tree_of_thought(
    seed: int, *, problems: int = 16, branches: int = 2, question_len: int = 80, thought_len: int = 64
) -> list[Call]:
    """Trees whose nodes are thoughts, each continued by `branches` samples (Yao et al. 2023).

    A prompt is the path to its node: a common instruction, the question, and for each level above a stage's own
    instruction and the thought. Those of one node's children are the same, and arrive when its own thought is there.
    Four stages (plan, carry out, reflect, answer) of two branches, as in SGLang's benchmark; all problems at once.
    """
    random = _Random(seed)
    common, stages, calls = random.ids(128), [random.ids(32) for _ in range(4)], list[Call]()

    def expand(path: Ids, after: int, priority: int, level: int) -> None:
        prompt = np.concatenate([path, stages[level]])
        for _ in range(branches):
            calls.append(Call(prompt, random.text(thought_len), after, 0.0, priority))
            if level + 1 < len(stages):
                expand(calls[-1].text, len(calls) - 1, priority, level + 1)

    for _ in range(problems):
        expand(np.concatenate([common, random.text(question_len)]), -1, random.priority(), 0)
    return calls


WORKLOADS: dict[str, Callable[[int], list[Call]]] = {
    "multi-turn": multi_turn,
    "few-shot": few_shot,
    "tree-of-thought": tree_of_thought,
}


class _Random(RandomIds):
    def __init__(self, seed: int) -> None:
        super().__init__(seed, np.arange(VOCABULARY, dtype=np.int32))

    def text(self, mean: int) -> Ids:
        """Ids whose number is log-normal."""
        length = self._random.lognormal(np.log(mean) - SPREAD**2 / 2, SPREAD)
        return self.ids(max(LEAST, round(length)))

    def priority(self) -> int:
        return self.between(0, PRIORITIES - 1)
