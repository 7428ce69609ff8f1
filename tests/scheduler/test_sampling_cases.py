"""Draws, seeds and ends through the whole scheduler and the real worker, on a model whose logits are known.

Random numbers are a function of (seed, position), so that a drawn output is worked out as exactly as a greedy one.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from differential import Runner, Seen
from table_model import MARKOV, VOCABULARY, Asked, TableModel, make, run, stated_output, submit

from gapless.detokenizer.manager import DetokenizerManager
from gapless.runtime.core.messages import Finish, Finished, Ready, StepOutput, Stop, Submit, int64s
from gapless.runtime.core.model_path import ModelSource
from gapless.runtime.core.sampling import SamplingParams
from gapless.runtime.model.config import ModelConfig
from gapless.runtime.tokenizer.byte_tokenizer import ByteTokenizer
from gapless.runtime.tokenizer.pieces import TokenPieces
from gapless.tokenizer_manager.prepare import prepare
from gapless.tokenizer_manager.schema import Prompt

pytestmark = pytest.mark.usefixtures("model")
OVERLAP = pytest.mark.parametrize("no_overlap", [False, True], ids=["overlap", "no overlap"])
READY = Ready(VOCABULARY, 256, 2048, 255, (), 0.0, {})
FILTERS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "cold": {"temperature": 0.5},
    "hot": {"temperature": 2},
    "top_k": {"top_k": 3},
    "top_p": {"top_p": 0.8},
    "min_p": {"min_p": 0.2},
    "all filters": {"temperature": 1.5, "top_k": 9, "top_p": 0.95, "min_p": 0.05},
    "frequency": {"frequency_penalty": 1.5},
    "presence": {"presence_penalty": -2},
    "repetition": {"repetition_penalty": 1.5},
    "bias": {"logit_bias": {str(i): 4 for i in range(20)}},
    "at least": {"min_new_tokens": 9},
    "all": {
        "temperature": 0.75, "top_k": 20, "top_p": 0.9, "min_p": 0.01, "frequency_penalty": 0.5,
        "presence_penalty": 0.25, "repetition_penalty": 1.25, "logit_bias": {"7": 3, "9": -2}, "min_new_tokens": 5,
    },
}  # fmt: skip
SEED = 1000  # uid and seed of what is looked at


def drawing(name: str) -> Asked:
    ends = tuple(range(0, VOCABULARY, 5)) if "min_new_tokens" in FILTERS[name] else ()
    return Asked({"temperature": 1} | FILTERS[name], [3, 8], 24, ends)


# ---------------------------------------------------------------- distributions


@OVERLAP
@pytest.mark.parametrize("name", FILTERS)
def test_each_field_alone_draws_the_stated_ids(name: str, no_overlap: bool) -> None:
    asked = drawing(name)
    want = stated_output(MARKOV, asked, SEED)
    assert run({SEED: asked}, disable_overlap_schedule=no_overlap)[SEED] == want
    without = Asked({"temperature": 1}, asked.prompt, asked.count, asked.stop_ids)
    assert name == "nothing" or want != stated_output(MARKOV, without, SEED), "the field shows nowhere"


@OVERLAP
@pytest.mark.parametrize("steps", [1, 4])
def test_each_field_beside_all_others_draws_the_stated_ids(no_overlap: bool, steps: int) -> None:
    """Greedy and constrained requests between them; five slots, and a pool in which some are preempted."""
    requests: dict[int, Asked] = {}
    for uid, name in enumerate(FILTERS, SEED):
        requests[uid] = drawing(name)
        requests[uid + 100] = Asked({"temperature": 0} | FILTERS[name], [uid % 60, 8], 20)
    requests |= {uid: Asked({"temperature": 1.5}, [uid], 20, constrained=True) for uid in (1, 2, 3)}
    got = run(
        requests,
        disable_overlap_schedule=no_overlap,
        num_scheduler_steps=steps,
        max_running_requests=5,
        max_total_tokens=64,
    )
    assert got == {uid: stated_output(MARKOV, asked, uid) for uid, asked in requests.items()}


PROBABILITIES: list[tuple[dict[str, Any], list[float]]] = [  # of four tokens that have 0.4, 0.3, 0.2 and 0.1
    ({}, [0.4, 0.3, 0.2, 0.1]),
    ({"temperature": 0}, [1, 0, 0, 0]),
    ({"temperature": 0.5}, [16 / 30, 9 / 30, 4 / 30, 1 / 30]),
    ({"temperature": 0.5, "top_p": 0.82}, [16 / 25, 9 / 25, 0, 0]),
    ({"temperature": 0.5, "top_p": 0.84, "min_p": 0.2}, [16 / 29, 9 / 29, 4 / 29, 0]),
    ({"top_k": 1}, [1, 0, 0, 0]),
    ({"top_k": 2}, [4 / 7, 3 / 7, 0, 0]),
    ({"top_p": 0.39}, [1, 0, 0, 0]),
    ({"top_p": 0.41}, [4 / 7, 3 / 7, 0, 0]),
    ({"top_p": 0.75}, [4 / 9, 3 / 9, 2 / 9, 0]),
    ({"min_p": 0.45}, [4 / 9, 3 / 9, 2 / 9, 0]),
    ({"min_p": 0.55}, [4 / 7, 3 / 7, 0, 0]),
    ({"top_k": 3, "min_p": 0.55}, [4 / 7, 3 / 7, 0, 0]),
    ({"top_k": 2, "top_p": 0.5}, [4 / 7, 3 / 7, 0, 0]),
    ({"logit_bias": {"0": -100}}, [0, 3 / 6, 2 / 6, 1 / 6]),
    ({"logit_bias": {"3": float(np.log(4))}}, [4 / 13, 3 / 13, 2 / 13, 4 / 13]),
    ({"logit_bias": {"1": 50}, "temperature": 2, "top_k": 2}, [0, 1, 0, 0]),
    ({"min_new_tokens": 100}, [0, 0, 2 / 3, 1 / 3]),
    ({"frequency_penalty": 1e-9}, [0.4, 0.3, 0.2, 0.1]),
]
POINTS = 100


@OVERLAP
def test_probabilities_are_the_stated_ones(
    model: TableModel, monkeypatch: pytest.MonkeyPatch, no_overlap: bool
) -> None:
    """All beside each other. Each output takes every number of an even grid, so that a token of probability p comes
    p * POINTS times, give or take one."""
    model.table = torch.full((VOCABULARY, VOCABULARY), -torch.inf)
    model.table[:, :4] = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()

    def grid(seeds: np.ndarray, positions: np.ndarray) -> np.ndarray:
        return ((positions + 31 * seeds) % POINTS + 0.5) / POINTS

    for module in ("plan_builder", "planner"):
        monkeypatch.setattr(f"gapless.runtime.scheduler.{module}.uniform", grid)
    requests = {
        uid: Asked({"temperature": 1} | fields, [9], POINTS, (0, 1) if "min_new_tokens" in fields else ())
        for uid, (fields, _) in enumerate(PROBABILITIES, 1)
    }
    got = run(
        requests, disable_overlap_schedule=no_overlap, max_running_requests=32, max_total_tokens=1 << 14
    )
    for (fields, want), ids in zip(PROBABILITIES, got.values(), strict=True):
        shares = np.bincount(ids, minlength=4) / POINTS
        assert len(ids) == POINTS
        assert np.abs(shares - want).max() <= 1.001 / POINTS, fields
        assert not shares[np.array(want) == 0].any(), fields


# ---------------------------------------------------------------- case 90: temperature 0


@OVERLAP
def test_temperature_zero_takes_the_first_of_the_best(model: TableModel, no_overlap: bool) -> None:
    """Whatever the filters and the seed, between rows that draw; so does 1e-6 where one is the best."""
    model.table = torch.zeros(VOCABULARY, VOCABULARY)
    model.table[:, [7, 12, 40]] = 2.0
    model.table[12, 30] = 2.25
    requests: dict[int, Asked] = {}
    for uid in range(0, 60, 5):
        requests[uid + 1] = Asked({"temperature": 0, "top_p": 0.1})
        requests[uid + 2] = Asked({"temperature": 9e-7, "min_p": 0.5})
        requests[uid + 3] = Asked({"temperature": 5.0, "top_k": 1})
        requests[uid + 4] = Asked({"temperature": 1e-6}, [12], 1)
        requests[uid + 5] = Asked({"temperature": 1})
    got = run(requests, disable_overlap_schedule=no_overlap, max_running_requests=16)
    for uid, ids in got.items():
        match uid % 5:
            case 1 | 2 | 3:
                assert ids == [7] * 20
            case 4:
                assert ids == [30]
            case _:
                assert ids == stated_output(model.table, requests[uid], uid)


# ---------------------------------------------------------------- case 89: seeds, and n samples


def samples(uid: int, n: int, seeds: list[int] | None = None, **fields: Any) -> list[Submit]:
    """As the HTTP process makes them; `seeds` are the server's own for a request that brings none."""
    params = SamplingParams.parse({"temperature": 1, "max_new_tokens": 24, "n": n} | fields)
    prompt = Prompt(None, [3, 8, 5, 1, 9], params, "r", ("r",))
    return prepare(prompt, list(enumerate(seeds or [0] * n, uid)), ByteTokenizer(), READY)


def send(runner: Runner, messages: list[Submit]) -> None:
    for message in messages:
        runner.seen[message.uid] = Seen()
    runner.scheduler.handle(messages)
    runner.collect()


@OVERLAP
@pytest.mark.parametrize("pool", [48, 2048], ids=["small pool", "large pool"])
def test_a_seeds_samples_are_the_same_in_any_company(no_overlap: bool, pool: int) -> None:
    """Alone, among 15 others, after a preemption: what they are stated to be. The samples differ."""
    messages = samples(1, 3, sampling_seed=7)
    asked = Asked({"temperature": 1}, [3, 8, 5, 1, 9], 24)
    want = [stated_output(MARKOV, asked, message.seed) for message in messages]
    assert messages[0].seed == 7
    assert len({tuple(ids) for ids in want}) == 3
    for others in (0, 15):
        company = {uid: drawing(list(FILTERS)[uid % len(FILTERS)]) for uid in range(100, 100 + others)}
        options = {
            "disable_overlap_schedule": no_overlap,
            "max_total_tokens": pool,
            "max_running_requests": 16,
        }
        runner = make(company, **options)
        for uid in list(company)[: others // 2]:
            submit(runner, uid, company[uid])
        send(runner, messages)
        for uid in list(company)[others // 2 :]:
            submit(runner, uid, company[uid])
        preempted = pool == 2048
        while runner.turn() or not runner.scheduler.is_idle:
            for slot in runner.scheduler.batch.running.tolist():
                request = runner.scheduler.batch.request(slot)
                half_way = request.submit.uid == 3 and runner.scheduler.batch.rows.output_len[slot] > 6
                if half_way and not preempted:
                    runner.scheduler.admission.preemption.preempt(request)
                    preempted = True
        runner.finish()
        assert preempted, "the last sample was never half-way"
        assert [runner.seen[message.uid].ids for message in messages] == want


@OVERLAP
def test_requests_without_a_seed_differ(no_overlap: bool) -> None:
    messages = [*samples(1, 2, seeds=[11, 12]), *samples(3, 1, seeds=[13])]
    runner = make({}, disable_overlap_schedule=no_overlap)
    send(runner, messages)
    runner.finish()
    assert len({tuple(seen.ids) for seen in runner.seen.values()}) == 3


# ---------------------------------------------------------------- cases 82 and 83: ends


class Detokenized(Runner):
    """The detokenizer behind the runner; its stop strings reach the scheduler before the next turn."""

    def __init__(self, *args: Any, **more: Any) -> None:
        self.manager = DetokenizerManager(TokenPieces.of([bytes([64 + i]) for i in range(VOCABULARY)], ()))
        self.texts: dict[int, str] = {}
        self.ended: dict[int, Finished] = {}
        self.stops: list[Stop] = []
        super().__init__(*args, **more)

    def turn(self) -> bool:
        stops, self.stops = self.stops, []
        for seen in self.seen.values():
            if any((stop.slot, stop.generation) == (seen.slot, seen.generation) for stop in stops):
                seen.finish = Finish.STOP_STRING
        self.scheduler.handle(list(stops))
        return super().turn() or bool(stops)

    def _collect(self, output: StepOutput) -> None:
        super()._collect(output)
        gained, stops = self.manager.handle(output)
        for uid, text in zip(int64s(gained.uids).tolist(), gained.texts, strict=True):
            self.texts[uid] = self.texts.get(uid, "") + text
        self.ended |= {finished.uid: finished for finished in gained.finished}
        self.stops += stops


def cycle(length: int) -> torch.Tensor:
    """Each of the first `length` ids is followed by the next one. Their text is @ABC..."""
    table = torch.full((VOCABULARY, VOCABULARY), -5.0)
    for token in range(length):
        table[token, (token + 1) % length] = 5.0
    return table


class NineEnds(ByteTokenizer):
    eos_token_ids = frozenset({9})


def ended(
    requests: list[tuple[dict[str, Any], int]], eos: tuple[int, ...], **options: Any
) -> list[tuple[str, int, int, int | str | None]]:
    """(text, tokens, finish, what was matched) of requests sent at once: their fields and the last id of their prompt.

    `eos` are the model's ids that end an output.
    """
    runner = make({}, Detokenized, max_running_requests=32, **options)
    ready = Ready(VOCABULARY, 256, 2048, 255, eos, 0.0, {})
    for uid, (fields, last) in enumerate(requests, 1):
        params = SamplingParams.parse({"temperature": 0, "max_new_tokens": 20} | fields)
        send(runner, prepare(Prompt(None, [40, last], params, "r", ("r",)), [(uid, 0)], NineEnds(), ready))
    runner.finish()
    ends = [runner.ended[uid] for uid in range(1, len(requests) + 1)]
    return [(runner.texts.get(e.uid, ""), e.completion_tokens, e.finish, e.matched) for e in ends]


ROUND = "@ABCDEFG@ABCDEFG@ABC"  # what comes where nothing ends it
ENDS: list[tuple[dict[str, Any], tuple[str, int, Finish, int | str | None]]] = [
    ({}, (ROUND, 20, Finish.LENGTH, None)),
    ({"max_new_tokens": 0}, ("", 0, Finish.LENGTH, None)),
    ({"max_new_tokens": 1}, ("@", 1, Finish.LENGTH, None)),
    ({"max_new_tokens": 5, "min_new_tokens": 5}, ("@ABCD", 5, Finish.LENGTH, None)),
    ({"stop": "B"}, ("@A", 3, Finish.STOP_STRING, "B")),
    ({"stop": ["GZ", "BD"]}, (ROUND, 20, Finish.LENGTH, None)),
    ({"stop": ["EF", "CDE"]}, ("@AB", 6, Finish.STOP_STRING, "CDE")),
    ({"stop": ["D", "CD"]}, ("@AB", 5, Finish.STOP_STRING, "CD")),
    ({"stop": "C", "no_stop_trim": True}, ("@ABC", 4, Finish.STOP_STRING, "C")),
    ({"stop": "C", "max_new_tokens": 4}, ("@AB", 4, Finish.STOP_STRING, "C")),
    ({"stop": "BC", "min_new_tokens": 3}, ("@A", 4, Finish.STOP_STRING, "BC")),
    ({"stop": "BC", "min_new_tokens": 4}, ("@ABCDEFG@A", 12, Finish.STOP_STRING, "BC")),
    ({"stop_token_ids": [3]}, ("@AB", 4, Finish.STOP_TOKEN, 3)),
    ({"stop_token_ids": [6, 3], "no_stop_trim": True}, ("@ABC", 4, Finish.STOP_TOKEN, 3)),
    ({"stop_token_ids": [3], "stop": "C"}, ("@AB", 4, Finish.STOP_TOKEN, 3)),
    ({"stop_token_ids": [3], "ignore_eos": True}, ("@AB", 4, Finish.STOP_TOKEN, 3)),
    ({"stop_token_ids": [1], "min_new_tokens": 2}, ("@@", 3, Finish.STOP_TOKEN, 1)),
]


@OVERLAP
@pytest.mark.parametrize("steps", [1, 4])
def test_ends_alone_and_beside_each_other(model: TableModel, no_overlap: bool, steps: int) -> None:
    model.table = cycle(8)
    options = {"disable_overlap_schedule": no_overlap, "num_scheduler_steps": steps}
    fields, wants = zip(*ENDS, strict=True)
    assert ended([(one, 7) for one in fields], (), **options) == list(wants)
    for one, want in ENDS:
        assert ended([(one, 7)], (), **options) == [want]


@OVERLAP
def test_min_new_tokens_keeps_every_end_away(model: TableModel, no_overlap: bool) -> None:
    """EOS forced by a bias, two ids that are EOS, and a stop string before the minimum: four tokens, then the end."""
    model.table = cycle(8)
    forced = {"logit_bias": {"6": 100}, "min_new_tokens": 4}
    requests = [
        (forced, 7),
        (forced | {"stop": ["B", "AB"]}, 7),
        (forced, 3),
        ({"logit_bias": {"6": 100}}, 7),
    ]
    assert ended(requests, (5, 6), disable_overlap_schedule=no_overlap) == [
        ("@ABC", 5, Finish.STOP_TOKEN, 6),
        ("@ABC", 5, Finish.STOP_TOKEN, 6),
        ("D@AB", 5, Finish.STOP_TOKEN, 6),
        ("", 1, Finish.STOP_TOKEN, 6),
    ]


@OVERLAP
def test_every_source_of_eos_counts_and_ignore_eos_ignores_them_all(
    model: TableModel, tmp_path: Path, no_overlap: bool
) -> None:
    """The model's configuration says 2, that of its generation 2 and 7, and the tokenizer 9."""
    shape = {
        "model_type": "llama", "vocab_size": VOCABULARY, "hidden_size": 8, "intermediate_size": 8,
        "num_hidden_layers": 1, "num_attention_heads": 1, "max_position_embeddings": 256, "rms_norm_eps": 1e-5,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(shape | {"eos_token_id": 2}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 7]}))
    model.config.eos_token_ids = ModelConfig.from_source(ModelSource("hf", tmp_path)).eos_token_ids
    model.table = cycle(16)
    ignoring = {"ignore_eos": True}
    requests = [
        ({}, 0),
        ({}, 4),
        ({}, 7),
        ({"min_new_tokens": 2}, 4),
        (ignoring | {"stop_token_ids": [12]}, 0),
    ]
    requests += [(ignoring, 0), (ignoring | {"stop_token_ids": [7]}, 0), ({"stop_token_ids": [1]}, 0)]
    eos = tuple(sorted(model.config.eos_token_ids))
    assert ended(requests, eos, disable_overlap_schedule=no_overlap) == [
        ("A", 2, Finish.STOP_TOKEN, 2),
        ("EF", 3, Finish.STOP_TOKEN, 7),
        ("H", 2, Finish.STOP_TOKEN, 9),
        ("EF", 3, Finish.STOP_TOKEN, 7),
        ("ABCDEFGHIJK", 12, Finish.STOP_TOKEN, 12),
        ("ABCDEFGHIJKLMNO@ABCD", 20, Finish.LENGTH, None),
        ("ABCDEF", 7, Finish.STOP_TOKEN, 7),
        ("", 1, Finish.STOP_TOKEN, 1),
    ]
