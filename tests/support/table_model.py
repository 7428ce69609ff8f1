"""A model whose logits are a table, and the output that it gives by the sampling fields' definition."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, TypeVar

import numpy as np
import torch
from differential import Runner, Seen
from stated_sampling import adjusted_logits, drawn
from torch import Tensor

from gapless.overlap.torch_worker import TorchWorker
from gapless.runtime.core.config import ServerConfig
from gapless.runtime.core.messages import Submit, column
from gapless.runtime.core.random import uniform
from gapless.runtime.core.sampling import SamplingParams

VOCABULARY = 64
MARKOV = torch.from_numpy(np.random.default_rng(3).integers(-24, 25, (VOCABULARY, VOCABULARY)) / 8).float()


class TableModel:
    """Its hidden state of a token is its id, and its logits are that id's row of a table."""

    def __init__(self, table: Tensor) -> None:
        self.table = table
        self.config = SimpleNamespace(
            context_length=256,
            vocab_size=VOCABULARY,
            eos_token_ids=frozenset({0}),
            architecture="table",
            hidden_size=1,
        )

    def new_cache(self, pages: int, page_size: int) -> list[tuple[Tensor, Tensor]]:
        return []

    def forward(self, ids: Tensor, cache: Any, batch: Any) -> Tensor:
        return ids[:, None]

    def logits(self, hidden: Tensor) -> Tensor:
        return self.table[hidden[:, 0]]


@dataclass
class Asked:
    fields: dict[str, Any]
    prompt: list[int] = field(default_factory=lambda: [5])
    count: int = 20
    stop_ids: tuple[int, ...] = ()
    constrained: bool = False

    @property
    def params(self) -> SamplingParams:
        return SamplingParams.parse({"temperature": 0, "max_new_tokens": self.count} | self.fields)


class Grammar:
    """What may come next depends on the last token alone."""

    def __init__(self) -> None:
        self.last = 0

    @staticmethod
    def after(last: int) -> set[int]:
        return {(last * 5 + 1) % VOCABULARY, (last * 3 + 2) % VOCABULARY, (last + 9) % VOCABULARY}

    def mask(self, wait_s: float) -> np.ndarray:
        bits = np.zeros(VOCABULARY, np.uint8)
        bits[list(self.after(self.last))] = 1
        return np.packbits(bits, bitorder="little").view(np.int32)

    def accept(self, token: int) -> None:
        assert token in self.after(self.last)
        self.last = token


def stated_output(table: Tensor, asked: Asked, seed: int) -> list[int]:
    """The output by the fields' definition, worked out token by token."""
    output: list[int] = []
    while len(output) < asked.count and not (output and output[-1] in asked.stop_ids):
        allowed: Collection[int] | None = (
            Grammar.after(output[-1] if output else 0) if asked.constrained else None
        )
        logits = table[[*asked.prompt, *output][-1]].tolist()
        z = adjusted_logits(logits, asked.params, asked.prompt, output, asked.stop_ids, allowed)
        if asked.params.greedy:
            output.append(z.index(max(z)))
        else:
            number = uniform(np.array([seed], np.int64), np.array([len(output)], np.int32))
            output.append(drawn(z, asked.params, float(number[0])))
    return output


R = TypeVar("R", bound=Runner)


def make(requests: dict[int, Asked], kind: type[R] = Runner, **options: Any) -> R:  # type: ignore[assignment]
    """A runner of the model, which makes grammars for those of `requests` that ask for one."""
    defaults = {
        "model_path": "table",
        "dtype": "float32",
        "attention_backend": "torch",
        "page_size": 4,
        "max_running_requests": 8,
        "max_total_tokens": 2048,
    }
    config = ServerConfig(**defaults | options)

    def make_grammar(submit: Submit) -> Grammar | None:
        asked = requests.get(submit.uid)
        return Grammar() if asked and asked.constrained else None

    return kind(config, worker=TorchWorker(config), make_grammar=make_grammar)


def submit(runner: Runner, uid: int, asked: Asked) -> None:
    runner.seen[uid] = Seen()
    message = Submit(uid, column(asked.prompt, "<i4"), asked.params, asked.stop_ids, seed=uid)
    runner.scheduler.handle([message])
    runner.collect()


def run(requests: dict[int, Asked], **options: Any) -> dict[int, list[int]]:
    """The ids of all of `requests`, by uid, sent at once."""
    runner = make(requests, **options)
    for uid, asked in requests.items():
        submit(runner, uid, asked)
    runner.finish()
    return {uid: seen.ids for uid, seen in runner.seen.items()}
