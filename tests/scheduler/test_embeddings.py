"""Embeddings through the whole scheduler: the same in every cell, each once, and only where asked for."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from differential import Runner
from embeddings import toy_state
from toy_logprobs import check_logprobs

from gapless.bench.random_model import TINY, write_random_model
from gapless.overlap.torch_worker import TorchWorker
from gapless.runtime.core.config import ServerConfig
from gapless.runtime.core.logprobs import LogprobParams
from gapless.runtime.core.messages import Finish
from gapless.runtime.model.toy import ToyKnobs

PROMPT = [(7 * i + 3) % 250 for i in range(40)]
CELLS = list(itertools.product((False, True), (1, 4), (1, 16), (False, True), (7, 64)))


def toy(**options: Any) -> Runner:
    defaults = {"model_path": "toy", "page_size": 4, "max_running_requests": 8, "context_length": 256}
    return Runner(ServerConfig(**defaults | options))


def embedding_of(runner: Runner, uid: int) -> np.ndarray:
    seen = runner.seen[uid]
    ((of_prompt, found),) = seen.logprobs
    assert of_prompt
    assert not found.values
    assert not seen.ids
    assert seen.finish == Finish.LENGTH
    return np.frombuffer(found.embedding, np.float32)


def options_of(cell: tuple[Any, ...]) -> dict[str, Any]:
    no_overlap, steps, page_size, no_cache, chunk = cell
    return {
        "disable_overlap_schedule": no_overlap,
        "num_scheduler_steps": steps,
        "page_size": page_size,
        "disable_radix_cache": no_cache,
        "chunked_prefill_size": chunk,
    }


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_they_are_the_closed_form_in_every_cell_beside_other_requests(cell: tuple[Any, ...]) -> None:
    runner = toy(**options_of(cell), max_num_batched_tokens=32)
    prompts = {uid: [uid, *PROMPT[: 6 * uid]] for uid in range(1, 7)}
    scores = LogprobParams(0, 2, (9,))
    for uid, prompt in prompts.items():
        runner.submit(uid, prompt, 0, embed=True)
        runner.submit(10 + uid, prompt, 9, logprobs=scores if uid % 2 else None)
        runner.turn()
    runner.finish()
    for uid, prompt in prompts.items():
        assert embedding_of(runner, uid).tolist() == toy_state(prompt, runner.knobs).tolist()
        assert runner.seen[10 + uid].ids == runner.expected(prompt, 9)
        check_logprobs(runner.knobs, prompt, scores if uid % 2 else None, runner.seen[10 + uid])
    asked = [row for plan in runner.plans for row in plan.logprobs if row.embeds]
    assert len(asked) == len(prompts)


@pytest.mark.parametrize(("length", "cached"), [(40, 36), (39, 36), (37, 36), (36, 32), (1, 0)])
def test_a_cached_prompt_computes_what_is_left_and_says_the_same(length: int, cached: int) -> None:
    runner, prompt = toy(), PROMPT[:length]
    for uid in (1, 2):
        runner.submit(uid, prompt, 0, embed=True)
        runner.finish()
    assert [runner.seen[uid].cached_tokens for uid in (1, 2)] == [0, cached]
    assert embedding_of(runner, 1).tolist() == embedding_of(runner, 2).tolist()


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
@pytest.mark.parametrize("steps", [1, 4])
def test_preempted_prompts_are_embedded_once(preemption: str, steps: int) -> None:
    """Rows that decode take its pages from a prompt that is computed in small chunks."""
    runner = toy(
        max_total_tokens=96, chunked_prefill_size=1, preemption=preemption, num_scheduler_steps=steps
    )
    short = {uid: [uid, *PROMPT[:8]] for uid in (1, 2)}
    for uid, prompt in short.items():
        runner.submit(uid, prompt, 40)
    runner.submit(3, PROMPT, 0, embed=True)
    runner.finish()
    assert runner.preemptions[3]
    assert embedding_of(runner, 3).tolist() == toy_state(PROMPT, runner.knobs).tolist()
    for uid, prompt in short.items():
        assert runner.seen[uid].ids == runner.expected(prompt, 40)


@pytest.mark.parametrize("turns", range(6))
def test_an_aborted_one_says_nothing_afterwards(turns: int) -> None:
    """Runner.collect asserts that nothing comes after the end."""
    runner = toy(chunked_prefill_size=16)
    runner.submit(1, PROMPT, 0, embed=True)
    for _ in range(turns):
        runner.turn()
    runner.abort(1)
    runner.finish()
    seen = runner.seen[1]
    assert seen.finish == (Finish.LENGTH if seen.logprobs else Finish.ABORT)


def test_steps_of_others_are_asked_for_nothing() -> None:
    runner = toy()
    runner.submit(1, PROMPT, 12)
    runner.submit(2, PROMPT[:9], 0, embed=True)
    runner.finish()
    assert sum(len(plan.logprobs) for plan in runner.plans) == 1
    assert not runner.scheduler.batch.scored


def test_another_seed_is_another_model() -> None:
    assert toy_state(PROMPT).tolist() != toy_state(PROMPT, ToyKnobs(seed=1)).tolist()


# ---------------------------------------------------------------- a real model


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = tmp_path_factory.mktemp("tiny")
    write_random_model(directory, TINY, torch.float32)
    return str(directory)


@pytest.mark.parametrize("cell", CELLS[::5], ids=str)
def test_they_are_transformers_last_hidden_states(checkpoint: str, cell: tuple[Any, ...]) -> None:
    """Each prompt twice, so that one hits; beside one that asks for log probabilities, and one for nothing."""
    config = ServerConfig(
        model_path=checkpoint,
        dtype="float32",
        max_total_tokens=2048,
        max_running_requests=8,
        **options_of(cell),
    )
    runner = Runner(config, worker=TorchWorker(config))
    prompts = [[(11 * i * i + 5 * j) % 500 + 1 for i in range(1 + 20 * j)] for j in range(4)]
    for attempt, (j, prompt) in itertools.product((0, 1), enumerate(prompts)):
        uid = 1 + 10 * attempt + j
        runner.submit(uid, prompt, 0, embed=True)
        runner.submit(100 + uid, prompt, 4, logprobs=LogprobParams(0, 2, (7,)) if attempt else None)
        if attempt:
            runner.finish()
    runner.finish()
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    for j, prompt in enumerate(prompts):
        with torch.inference_mode():
            want = model(torch.tensor([prompt]), output_hidden_states=True).hidden_states[-1][0, -1]
        assert runner.scheduler.batch.is_idle()
        for uid in (1 + j, 11 + j):
            np.testing.assert_allclose(embedding_of(runner, uid), want.numpy(), atol=2e-4)
