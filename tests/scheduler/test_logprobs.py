"""Log probabilities through the whole scheduler: the same in every cell, each once, and only where asked for."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from differential import Runner, Seen
from toy_logprobs import Entry, check_logprobs, read_logprobs

from gapless.bench.random_model import TINY, write_random_model
from gapless.overlap.torch_worker import TorchWorker
from gapless.runtime.core.config import ServerConfig
from gapless.runtime.core.logprobs import LogprobParams
from gapless.runtime.core.messages import Submit, column
from gapless.runtime.core.sampling import SamplingParams
from gapless.runtime.model.toy import toy_output

PROMPT = [(7 * i + 3) % 250 for i in range(40)]
ALL = LogprobParams(0, 3, (5, 250))


def toy(**options: Any) -> Runner:
    defaults = {"model_path": "toy", "page_size": 4, "max_running_requests": 8, "context_length": 256}
    return Runner(ServerConfig(**defaults | options))


def check(runner: Runner, asked: dict[int, tuple[list[int], LogprobParams | None]]) -> None:
    for uid, (prompt, params) in asked.items():
        check_logprobs(runner.knobs, prompt, params, runner.seen[uid])


@pytest.mark.parametrize(("start", "cached"), [(0, 0), (1, 0), (17, 16), (30, 28), (39, 36), (40, 36)])
def test_a_prefix_is_reused_up_to_the_start_and_the_answer_is_the_same(start: int, cached: int) -> None:
    runner, params = toy(), LogprobParams(start, 2, (9,))
    for uid in (1, 2):
        runner.submit(uid, PROMPT, 4, logprobs=params)
        runner.finish()
    assert [runner.seen[uid].cached_tokens for uid in (1, 2)] == [0, cached]
    assert read(runner, 1, params) == read(runner, 2, params)
    check(runner, {1: (PROMPT, params), 2: (PROMPT, params)})


def read(runner: Runner, uid: int, params: LogprobParams) -> tuple[list[Entry], list[Entry]]:
    """Those of the prompt, and those of the output."""
    parts = runner.seen[uid].logprobs
    of_prompt, of_output = ([part for kind, part in parts if kind == wanted] for wanted in (True, False))
    return read_logprobs(of_prompt, params), read_logprobs(of_output, params)


def test_whoever_computes_its_prompt_anyway_waits_for_nobody() -> None:
    runner = toy(chunked_prefill_size=8)
    prompt = [(3 * i) % 250 for i in range(120)]
    runner.submit(1, prompt, 3)
    runner.turn()
    runner.submit(2, prompt, 3, logprobs=ALL)
    runner.submit(3, prompt, 3, leader=1, logprobs=ALL)
    runner.submit(4, prompt, 3)
    runner.turn()
    assert {uid for uid, seen in runner.seen.items() if seen.slot} == {1, 2, 3}, "only uid 4 waits"
    runner.finish()
    check(runner, {1: (prompt, None), 2: (prompt, ALL), 3: (prompt, ALL), 4: (prompt, None)})
    assert [runner.seen[uid].cached_tokens for uid in (2, 3)] == [0, 0]


@pytest.mark.parametrize("length", [21, 24, 25])
def test_samples_have_their_own(length: int) -> None:
    """Those who want none of the prompt's share the first one's pages, others from the start on compute it."""
    runner, prompt = toy(), PROMPT[:length]
    wanted = {1: ALL, 2: ALL, 3: LogprobParams(length, 2), 4: LogprobParams(length - 2, 2)}
    for uid, params in wanted.items():
        runner.submit(uid, prompt, 5, leader=1 if uid > 1 else -1, logprobs=params)
    runner.finish()
    check(runner, {uid: (prompt, params) for uid, params in wanted.items()})


@pytest.mark.parametrize("count", [0, 1])
def test_a_prompt_alone(count: int) -> None:
    """As select asks: no output, or one token, and the prompt's."""
    runner = toy(chunked_prefill_size=8)
    wanted = {1: LogprobParams(0), 2: LogprobParams(39, 1), 3: LogprobParams(40)}
    for uid, params in wanted.items():
        runner.submit(uid, PROMPT, count, logprobs=params)
    runner.submit(4, [8], count, logprobs=ALL)
    runner.finish()
    check(runner, {uid: (PROMPT, params) for uid, params in wanted.items()} | {4: ([8], ALL)})
    assert [len(read(runner, uid, params)[0]) for uid, params in wanted.items()] == [39, 1, 0]


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
@pytest.mark.parametrize("steps", [1, 4])
def test_a_preempted_request_sends_none_twice(preemption: str, steps: int) -> None:
    runner = toy(
        max_total_tokens=96, chunked_prefill_size=8, preemption=preemption, num_scheduler_steps=steps
    )
    asked = {uid: (PROMPT[: 10 + uid], ALL) for uid in range(1, 7)}
    for uid, (prompt, params) in asked.items():
        runner.submit(uid, prompt, 30, logprobs=params)
    runner.finish()
    assert any(runner.preemptions.values())
    check(runner, asked)


def test_what_others_do_not_ask_for_is_not_looked_for() -> None:
    runner = toy()
    runner.submit(1, PROMPT, 6)
    runner.submit(2, PROMPT[:9], 3, logprobs=ALL)
    runner.finish()
    slots = {runner.seen[2].slot}
    for plan in runner.plans:
        assert {row.slot for row in plan.logprobs} <= slots
        assert sum(row.ids is None for row in plan.logprobs) <= 1
    assert not runner.plans[-1].logprobs
    check(runner, {1: (PROMPT, None), 2: (PROMPT[:9], ALL)})


def mask_after(output: list[int]) -> np.ndarray:
    """Every third id may follow, other ones each time."""
    mask = np.zeros(512, np.uint8)
    mask[len(output) % 3 :: 3] = 1
    return np.packbits(mask, bitorder="little").view(np.int32)


class Thirds:
    def __init__(self) -> None:
        self.output: list[int] = []

    def mask(self, wait_s: float) -> np.ndarray:
        return mask_after(self.output)

    def accept(self, token: int) -> None:
        self.output.append(token)


@pytest.mark.parametrize(
    "options", [{}, {"disable_overlap_schedule": True}, {"num_scheduler_steps": 4}], ids=str
)
def test_constrained_rows_have_those_of_their_late_samples(options: dict[str, Any]) -> None:
    """The mask changes what is picked, not the log probability of it."""
    config = ServerConfig(model_path="toy", page_size=4, context_length=256, **options)
    runner = Runner(config, make_grammar=lambda submit: Thirds() if submit.uid % 2 else None)
    asked = {uid: (PROMPT[: 9 + uid], ALL if uid != 2 else None) for uid in range(1, 6)}
    for uid, (prompt, params) in asked.items():
        runner.submit(uid, prompt, 12, logprobs=params)
    runner.finish()
    check(runner, asked)
    for uid in (1, 3, 5):
        assert runner.seen[uid].ids == toy_output(runner.knobs, asked[uid][0], 12, mask_after)


# ---------------------------------------------------------------- a real model


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = tmp_path_factory.mktemp("tiny")
    write_random_model(directory, TINY, torch.float32)
    return str(directory)


CELLS = list(itertools.product((False, True), (1, 4), (1, 16), (False, True), (7, 64)))
FIELDS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.3, "top_p": 0.9},
    {"temperature": 0.0, "frequency_penalty": 1.5, "logit_bias": {"7": 50}},
]


@pytest.mark.parametrize("cell", CELLS[::5], ids=str)
def test_they_are_those_of_the_models_own_logits_in_every_cell(
    checkpoint: str, cell: tuple[Any, ...]
) -> None:
    """transformers' log_softmax, whatever the parameters do to the sampling; each prompt twice, so that one hits."""
    no_overlap, steps, page_size, no_cache, chunk = cell
    config = ServerConfig(
        model_path=checkpoint,
        dtype="float32",
        disable_overlap_schedule=no_overlap,
        num_scheduler_steps=steps,
        page_size=page_size,
        disable_radix_cache=no_cache,
        chunked_prefill_size=chunk,
        max_total_tokens=2048,
        max_running_requests=8,
    )
    runner = Runner(config, worker=TorchWorker(config))
    prompts = [[(11 * i * i + 5 * j) % 500 + 1 for i in range(12 + 20 * j)] for j in range(3)]
    wanted = [LogprobParams(0, 4, (3, 400)), LogprobParams(25, 1), LogprobParams(52, 0, (7,))]
    for attempt, (j, prompt) in itertools.product((0, 1), enumerate(prompts)):
        uid, params = 3 * attempt + j + 1, SamplingParams.parse(FIELDS[j] | {"max_new_tokens": 9})
        submit = Submit(uid, column(prompt, "<i4"), params, (), seed=j, logprobs=wanted[j])
        runner.seen[uid] = Seen()
        runner.scheduler.handle([submit])
        if attempt:
            runner.finish()
    runner.finish()
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    for uid, seen in runner.seen.items():
        j = (uid - 1) % 3
        of_prompt, of_output = read(runner, uid, wanted[j])
        ids, first = [*prompts[j], *seen.ids], max(wanted[j].start, 1)
        with torch.inference_mode():
            want = model(torch.tensor([ids])).logits[0].log_softmax(1)
        entries = of_prompt + of_output
        assert len(seen.ids) == len(of_output) == 9
        assert len(entries) == len(ids) - min(first, len(prompts[j]))
        for place, (value, top, chosen) in enumerate(entries, min(first, len(prompts[j]))):
            row = want[place - 1]
            assert value == pytest.approx(float(row[ids[place]]), abs=2e-4)
            assert chosen == pytest.approx(row[list(wanted[j].ids)].tolist(), abs=2e-4)
            best = row.topk(wanted[j].top).values.tolist()
            assert [v for v, _ in top] == pytest.approx(best, abs=2e-4)
            assert [float(row[token]) for _, token in top] == pytest.approx(best, abs=2e-4)
    for uid in (1, 2, 3):
        assert runner.seen[uid].ids == runner.seen[uid + 3].ids
