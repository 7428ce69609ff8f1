"""Hit rates of the prefix cache: workloads x scheduling policies x eviction strategies x shares of the memory needed.

The real scheduler and its loop run on a simulated device with a virtual clock; the ids are the workload's. So the
figures depend on the seed alone, and a run takes less time than it would on the GPU.
"""

from __future__ import annotations

import argparse
import dataclasses
import heapq
from collections.abc import Sequence
from itertools import product
from typing import Any

import numpy as np

from gapless.bench.report import add_report_options, envelope, progress, write_json
from gapless.bench.workloads import VOCABULARY, WORKLOADS, Best, Call, best_possible
from gapless.overlap.cost_model import PROFILES, SHAPES, CostModel
from gapless.overlap.device import Ids
from gapless.overlap.simulated import ConstantWorker, SimulatedDevice, VirtualClock
from gapless.runtime.core.config import ServerConfig
from gapless.runtime.core.errors import InternalError
from gapless.runtime.core.messages import (
    StepOutput,
    Submit,
    ToDetokenizer,
    ToScheduler,
    column,
    int32s,
    uint8s,
)
from gapless.runtime.core.plan import DeviceInfo, Plan
from gapless.runtime.core.sampling import SamplingParams
from gapless.runtime.scheduler.main import loop_with
from gapless.runtime.scheduler.scheduler import Scheduler

MEMORY_SHARES = (0.25, 0.5, 1.0)
RUNNING = 16  # requests at once
GPU, MODEL = "H100", "llama-3-8b"  # whose step times the virtual clock shows


class Clients:
    """Both channels of a loop: sends each call when it is due, and counts the prompt tokens that were cached."""

    def __init__(self, calls: Sequence[Call], clock: VirtualClock) -> None:
        self.cached_tokens = 0
        self.open = len(calls)
        self._calls, self._clock = calls, clock
        self._followers: list[list[int]] = [[] for _ in calls]
        self._due: list[tuple[float, int]] = []  # a heap of seconds and numbers of calls
        self._uids: dict[tuple[int, int], int] = {}  # by slot and generation
        for uid, call in enumerate(calls):
            if call.after < 0:
                self._due.append((call.delay, uid))
            else:
                self._followers[call.after].append(uid)
        heapq.heapify(self._due)

    def wait(self, timeout_ms: int) -> bool:
        """Nothing runs, so nothing can happen before the next arrival."""
        if self._due:
            self._clock.wait_until(self._due[0][0])
        return bool(self._due)

    def drain(self) -> list[ToScheduler]:
        messages: list[ToScheduler] = []
        while self._due and self._due[0][0] <= self._clock.now():
            messages.append(self._submit(heapq.heappop(self._due)[1]))
        return messages

    def send(self, message: ToDetokenizer) -> None:
        if not isinstance(message, StepOutput):
            return
        for opened in message.opened:
            self._uids[opened.slot, opened.generation] = opened.uid
            self.cached_tokens += opened.cached_tokens
        if message.closed:
            raise InternalError(f"bench cache: a request failed: {message.closed[0].message}")
        ended = uint8s(message.finish) > 0
        slots, generations = int32s(message.slots)[ended], int32s(message.generations)[ended]
        for name in zip(slots.tolist(), generations.tolist(), strict=True):
            self.open -= 1
            for uid in self._followers[self._uids.pop(name)]:
                heapq.heappush(self._due, (self._clock.now() + self._calls[uid].delay, uid))

    def _submit(self, uid: int) -> Submit:
        call = self._calls[uid]
        params = SamplingParams(max_new_tokens=len(call.answer), temperature=0.0, ignore_eos=True)
        return Submit(uid, column(call.prompt, "<i4"), params, (), seed=uid, priority=call.priority)


class ScriptedWorker(ConstantWorker):
    """Samples the ids of the answers. `scheduler` is set before the first step; it knows who has a slot."""

    scheduler: Scheduler

    def __init__(self, calls: Sequence[Call], info: DeviceInfo) -> None:
        super().__init__(info)
        self._calls = calls

    def run(self, plan: Plan) -> Ids:
        request = self.scheduler.batch.request
        rows = zip(plan.sampling.slots.tolist(), plan.sampling.output_index.tolist(), strict=True)
        ids = [self._calls[request(slot).submit.uid].answer[index] for slot, index in rows]
        return np.array(ids, np.int64)


def cached_tokens(calls: Sequence[Call], config: ServerConfig) -> int:
    """Prompt tokens that come from the cache when the scheduler serves `calls` with a pool of max_total_tokens."""
    longest = max(len(call.text) for call in calls)
    if config.max_total_tokens < longest:
        raise InternalError(
            f"bench cache: a pool of {config.max_total_tokens} tokens for a request of {longest}"
        )
    clock, worker = VirtualClock(), ScriptedWorker(calls, _device_info(config, longest))
    device = SimulatedDevice(
        worker, CostModel(PROFILES[GPU], SHAPES[MODEL], config.page_size), clock, "simulated"
    )
    clients, scheduler = Clients(calls, clock), Scheduler(config, device.start())
    worker.scheduler = scheduler
    loop = loop_with(config, scheduler, device, clients, clients)
    while clients.open or not scheduler.is_idle:
        loop.turn()
    if problem := scheduler.audit():
        raise InternalError(f"bench cache: {problem}")
    return clients.cached_tokens


def _device_info(config: ServerConfig, context_length: int) -> DeviceInfo:
    return DeviceInfo(
        description="simulated",
        dtype="bfloat16",
        vocab_size=VOCABULARY,
        context_length=context_length,
        eos_token_ids=(),
        pages=config.max_total_tokens // config.page_size,
        load_seconds=0.0,
        attention_backend="none",
        architecture="none",
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    choices = {field.name: field.metadata["choices"] for field in dataclasses.fields(ServerConfig)}

    def some(name: str, values: Sequence[Any], what: str, kind: type = str) -> None:
        shown = "{" + ",".join(map(str, values)) + "}"
        help = f"{what}, one or more (default: all)"
        parser.add_argument(
            name, nargs="+", type=kind, choices=values, default=list(values), metavar=shown, help=help
        )

    some("--workload", tuple(WORKLOADS), "who asks what")
    some("--policy", choices["schedule_policy"], "order of the queue")
    some("--eviction", choices["radix_eviction_policy"], "which unused prefix goes first")
    some("--memory-share", MEMORY_SHARES, "of the memory that the workload would need", float)
    add_report_options(parser, seed_of="the workloads")


def run(parsed: argparse.Namespace) -> int:
    options = {"max_running_requests": RUNNING, "sim_device": GPU, "sim_model": MODEL}
    report: dict[str, Any] = {
        **envelope("cache", options, parsed.seed, model=MODEL, device=f"simulated {GPU}"),
        "workloads": {},
        "results": [],
    }
    for name in parsed.workload:
        calls = WORKLOADS[name](parsed.seed)
        facts, results = measure(name, calls, parsed)
        report["workloads"][name] = facts
        report["results"] += results
        print_table(name, facts, results)
    if parsed.json:
        write_json(parsed.json, report)
    return 0


def measure(
    name: str, calls: Sequence[Call], parsed: argparse.Namespace
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """What the workload is, and its hit rate for each policy, eviction strategy and share of memory asked for."""
    size = ServerConfig.page_size
    best = best_possible(calls, size)
    pages = pages_needed(best)
    results = []
    with progress(f"{name}: {len(calls)} requests"):
        for policy, eviction, share in product(parsed.policy, parsed.eviction, parsed.memory_share):
            config = ServerConfig(
                model_path="toy",
                device="sim",
                schedule_policy=policy,
                radix_eviction_policy=eviction,
                max_running_requests=RUNNING,
                max_total_tokens=int(share * pages) * size,
                random_seed=1,  # for the policy `random`
            )
            results.append(
                {
                    "workload": name,
                    "policy": policy,
                    "eviction": eviction,
                    "memory_share": share,
                    "hit_rate": cached_tokens(calls, config) / best.prompt_tokens,
                    "oracle_hit_rate": best.hit_rate,
                }
            )
    facts = {
        "requests": len(calls),
        "prompt_tokens": best.prompt_tokens,
        "oracle_hit_rate": best.hit_rate,
        "pages_needed": pages,
    }
    return facts, results


def pages_needed(best: Best) -> int:
    """The peak of an unlimited cache: all distinct whole pages, and one that each running request is filling."""
    return best.pages + RUNNING


def print_table(name: str, facts: dict[str, Any], results: Sequence[dict[str, Any]]) -> None:
    """Hit rates in percent of the oracle's: a line for each policy, a column for each share of memory and strategy."""
    print(
        f"\n{name}: {facts['requests']} requests, {facts['prompt_tokens']} prompt tokens, "
        f"{facts['oracle_hit_rate']:.1%} of which the oracle has cached; needs {facts['pages_needed']} pages"
    )
    shares, strategies, policies = (
        list(dict.fromkeys(result[key] for result in results))
        for key in ("memory_share", "eviction", "policy")
    )
    rates = {
        (r["policy"], r["memory_share"], r["eviction"]): r["hit_rate"] / r["oracle_hit_rate"] for r in results
    }
    width = 9 * len(strategies)
    print(f"{'memory':12}" + " ".join(f"{f'{share:.0%}':^{width}}" for share in shares))
    print(f"{'eviction':12}" + " ".join("".join(f"{s:>9}" for s in strategies) for _ in shares))
    for policy in policies:
        cells = ("".join(f"{100 * rates[policy, share, s]:9.1f}" for s in strategies) for share in shares)
        print(f"{policy:12}" + " ".join(cells))
