"""Runs a model on shuffled pages, as a scheduler would."""

from __future__ import annotations

import torch
from torch import Tensor

from gapless.kernels.ops import StepBatch
from gapless.runtime.model.interface import Model


class PagedRun:
    """Requests by name, each with its token ids, its own slot and pages in no order."""

    def __init__(self, model: Model, prompts: dict[str, list[int]], page_size: int) -> None:
        self.model, self.prompts, self.page_size = model, prompts, page_size
        pages = -(-max(map(len, prompts.values())) // page_size)
        total = pages * (len(prompts) + 1)
        order = torch.randperm(total, generator=torch.Generator().manual_seed(7)).int()
        self.page_table = order.view(-1, pages)  # the first slot stays unused
        self.slots = {name: len(prompts) - i for i, name in enumerate(prompts)}
        self.cache = [(k, v) for k, v in model.new_cache(total, page_size)]
        self.done = dict.fromkeys(prompts, 0)

    def step(self, counts: dict[str, int]) -> dict[str, Tensor]:
        """Computes the next `counts` tokens of some requests in one forward; returns the logits of each token."""
        spans = {name: range(self.done[name], self.done[name] + count) for name, count in counts.items()}
        ids = [self.prompts[name][p] for name, span in spans.items() for p in span]
        hidden = self.model.forward(torch.tensor(ids), self.cache, self._batch(spans))
        self.done |= {name: span.stop for name, span in spans.items()}
        logits = self.model.logits(hidden).split(list(counts.values()))
        return dict(zip(counts, logits, strict=True))

    def _batch(self, spans: dict[str, range]) -> StepBatch:
        size = self.page_size
        places = [
            int(self.page_table[self.slots[name], p // size]) * size + p % size
            for name, span in spans.items()
            for p in span
        ]
        lengths = [len(span) for span in spans.values()]
        ends = [span.stop for span in spans.values()]

        def int32(values: list[int]) -> Tensor:
            return torch.tensor(values, dtype=torch.int32)

        return StepBatch(
            q_start=torch.cat((int32([0]), int32(lengths).cumsum(0).int())),
            kv_len=int32(ends),
            slots=int32([self.slots[name] for name in spans]),
            page_table=self.page_table,
            positions=int32([p for span in spans.values() for p in span]),
            out_loc=int32(places),
            page_size=size,
            max_kv_len=max(ends),
            max_q_len=max(lengths),
        )
