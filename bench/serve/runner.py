"""One run of a load after the other on the same server."""

from __future__ import annotations

import argparse
import dataclasses
import math
from typing import Any

import numpy as np

from gapless.bench.serve import arrivals, datasets, options, plot
from gapless.bench.serve.caveats import caveats
from gapless.bench.serve.dialects import Asking, is_messages
from gapless.bench.serve.driver import Driver, Load, Outcome
from gapless.bench.serve.metrics import details, summarize
from gapless.bench.serve.oracle import explained_tokens
from gapless.bench.serve.progress import Progress
from gapless.bench.serve.record import Item
from gapless.bench.serve.server import Facts, check_answers, flush
from gapless.runtime.core.errors import ConfigError
from gapless.runtime.core.http_client import HttpClient
from gapless.runtime.tokenizer.base import Tokenizer

WARM_UP_SEED = 1 << 32  # added to a run's: no seed that a run has


class Runner:
    """Makes the figures of a run. Each has a seed of its own, so that none finds the prompts of the one before."""

    def __init__(
        self,
        parsed: argparse.Namespace,
        client: HttpClient,
        asking: Asking,
        facts: Facts,
        tokenizer: Tokenizer,
    ) -> None:
        self._parsed, self._client, self._asking, self._tokenizer = parsed, client, asking, tokenizer
        self._vocab_size = facts.vocab_size or tokenizer.vocab_size
        self._goodput = options.goodput_from(parsed)
        self._runs = 0
        self.finished: list[dict[str, Any]] = []  # the figures of the runs that are over
        self.drawn: list[plot.Run] = []  # what a plot needs of the runs, where there is to be one

    async def run(self, *, rate: float | None = None, concurrency: int | None = None) -> dict[str, Any]:
        """The figures; `rate` and `concurrency` in place of what the options say."""
        parsed = argparse.Namespace(**vars(self._parsed))
        parsed.seed += self._runs
        self._runs += 1
        parsed.request_rate = parsed.request_rate if rate is None else rate
        parsed.max_concurrency = parsed.max_concurrency if concurrency is None else concurrency
        items = datasets.make_items(parsed, self._tokenizer, self._vocab_size)
        if rate is not None and any(item.at is not None for item in items):
            raise ConfigError("--find-max-rate and --sweep request-rate: the dataset has times of its own")
        due = arrivals.due_times(
            items,
            rate=parsed.request_rate,
            burstiness=parsed.burstiness,
            ramp_up=arrivals.ramp_up_from(parsed),
            seed=parsed.seed,
        )
        if not self.finished:
            await check_answers(self._client, self._asking, items[0].prompt)
        cold = await self._warm_up(items, parsed)
        if parsed.flush_cache:
            await flush(self._client, parsed.backend)
        load = Load(items, due, parsed.max_concurrency, parsed.duration, parsed.request_timeout)
        outcome = await self._drive(load)
        figures = self._figures(outcome, parsed)
        figures["warnings"] = cold + figures["warnings"]
        if parsed.plot:
            label = f"rate {figures['request_rate']}, limit {figures['max_concurrency'] or 'none'}"
            self.drawn.append(plot.Run(label, figures, outcome.records, outcome.samples))
        self.finished.append(figures)
        return figures

    async def _warm_up(self, items: list[Item], parsed: argparse.Namespace) -> list[str]:
        """Requests as long as the first ones, of ids that no run has. Returns a warning where some failed."""
        if not parsed.warmup_requests:
            return []
        random = np.random.default_rng(WARM_UP_SEED + parsed.seed)
        ids = datasets.plain_ids(self._tokenizer, self._vocab_size)

        def other(item: Item) -> Item:
            prompt: list[int] = random.choice(ids, item.prompt_len).tolist()
            chat = [{"role": "user", "content": self._tokenizer.decode(prompt)}]
            return dataclasses.replace(item, prompt=chat if is_messages(item.prompt) else prompt, after=None)

        others = [other(item) for item in items[: parsed.warmup_requests]]
        load = Load(others, np.zeros(len(others)), parsed.max_concurrency, timeout=parsed.request_timeout)
        records = (await self._drive(load, shown=False)).records
        errors = [record.error for record in records if record.error]
        if not errors:
            return []
        return [f"failed warm-up requests: {len(errors)} of {len(others)}; one of them: {errors[0]}"]

    async def _drive(self, load: Load, shown: bool = True) -> Outcome:
        enabled = shown and not self._parsed.no_progress
        progress = Progress(len(load.items), load.duration or math.inf, enabled=enabled)
        try:
            return await Driver(self._client, self._asking, load, self._tokenizer, progress).run()
        finally:
            progress.close()

    def _figures(self, outcome: Outcome, parsed: argparse.Namespace) -> dict[str, Any]:
        summary = summarize(outcome.records, outcome.duration, self._goodput)
        found = details(outcome.records)
        if not parsed.output_details:
            found = {
                name: values for name, values in found.items() if name not in ("itls", "generated_texts")
            }
        explained = explained_tokens(outcome.exchanges)
        return {
            "request_rate": parsed.request_rate,
            "max_concurrency": parsed.max_concurrency,
            "seed": parsed.seed,
            **summary,
            "unsent": outcome.unsent,
            "explained_cached_tokens": explained,
            "client_cpu_cores": outcome.client_cpu,
            "client_lag_p99_ms": outcome.loop_lag_p99_ms,
            "warnings": caveats(
                summary,
                explained_tokens=explained,
                chat=outcome.chat,
                ignore_eos=self._asking.ignore_eos,
                flushed=parsed.flush_cache,
                client_cores=outcome.client_cpu,
                loop_lag_ms=outcome.loop_lag_p99_ms,
            ),
            "details": found,
            "samples": outcome.samples,
        }
