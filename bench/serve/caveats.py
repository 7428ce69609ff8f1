"""What a reader must know before trusting a run's figures."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

MANY_CORES = 0.9  # of one core: the client's loop runs on one
MANY_MS = 10.0  # of lag
DIFFERENT = 0.05  # share by which two counts of the same tokens may differ
CHANCE_TOKENS = 4  # a request's cached tokens that a BOS and chance explain
CHAT_TOKENS = 64  # the same, with the head of a chat template
FEW_REQUESTS = 30


def caveats(
    summary: Mapping[str, Any],
    *,
    explained_tokens: int = 0,
    chat: bool = False,
    ignore_eos: bool = True,
    flushed: bool = False,
    client_cores: float = 0.0,
    loop_lag_ms: float = 0.0,
) -> list[str]:
    """Warnings, a line each, from what metrics.summarize() gave.

    `explained_tokens`: prompt tokens that a cache which was empty at the start can have had. `chat`: the server wraps
    prompts in a template. `flushed`: the cache was emptied before the run. `client_cores`: the CPU seconds that the
    client used a second. `loop_lag_ms`: how late its event loop ran, the 99th percentile.
    """
    return [
        *_of_requests(summary),
        *_of_lengths(summary, ignore_eos),
        *_of_tokens(summary),
        *_of_cache(summary, explained_tokens, CHAT_TOKENS if chat else CHANCE_TOKENS, flushed),
        *_of_client(summary, client_cores, loop_lag_ms),
    ]


def _of_requests(summary: Mapping[str, Any]) -> list[str]:
    found, completed, failed = [], summary["completed"], summary["failed"]
    if failed:
        message, count = next(iter(summary["error_counts"].items()))  # the commonest comes first
        total = completed + failed + summary["cut"]
        found.append(f"failed requests: {failed} of {total}; {count} of them: {message}")
    if not completed:
        return [*found, "no request completed: there are no latencies"]
    if completed < FEW_REQUESTS:
        found.append(f"p99 of {completed} requests is little else than the slowest one")
    if summary["cut_output_tokens"] > DIFFERENT * summary["total_output_tokens"]:
        found.append(
            f"cut requests: {summary['cut']}; their {summary['cut_output_tokens']} output tokens are in no rate: "
            "a longer run loses less at its end"
        )
    return found


def _of_lengths(summary: Mapping[str, Any], ignore_eos: bool) -> list[str]:
    actual, asked, early = (
        summary[key] for key in ("total_output_tokens", "asked_output_tokens", "early_stops")
    )
    if actual == asked and not early:
        return []
    why = " although EOS was to be ignored" if ignore_eos else ""
    return [f"output tokens: {actual} instead of {asked}; requests that stopped early: {early}{why}"]


def _of_tokens(summary: Mapping[str, Any]) -> list[str]:
    found = []
    total, retokenized = summary["total_output_tokens"], summary["total_output_tokens_retokenized"]
    if summary["without_usage"]:
        found.append(
            f"answers without usage: {summary['without_usage']}; their token counts are the client's"
        )
    if retokenized is not None and _differ(retokenized, total):
        found.append(
            f"output tokens: {total} by the server's count, {retokenized} by the client's, of the same texts"
        )
    if _differ(summary["chunk_output_tokens"], total):
        found.append(
            f"output tokens known by chunk: {summary['chunk_output_tokens']} of {total}; ITL is of those alone"
        )
    if summary["single_chunk"]:
        found.append(f"answers in one chunk: {summary['single_chunk']}; their TPOT is 0 and says nothing")
    return found


def _of_cache(summary: Mapping[str, Any], explained: int, chance: int, flushed: bool) -> list[str]:
    cached = summary["cached_tokens"]
    if cached is None:
        unknown = "the server does not say how much came from its cache: whether it was warm is not known"
        return [unknown] if summary["completed"] and not flushed else []
    if cached <= explained + chance * summary["completed"]:
        return []
    return [
        f"prompt tokens from the cache: {cached} ({summary['cache_hit_rate']:.1%}) though the load itself explains "
        f"{explained}: it was warm; use --flush-cache or another --seed"
    ]


def _of_client(summary: Mapping[str, Any], cores: float, loop_lag_ms: float) -> list[str]:
    found, late = [], summary["p99_send_lag_ms"]
    if cores > MANY_CORES:
        found.append(f"the client used {cores:.0%} of a core: it may be the bottleneck")
    if late is not None and late > MANY_MS:
        found.append(f"requests were sent late (p99 {late:.0f} ms): the client may be the bottleneck")
    if loop_lag_ms > MANY_MS:
        found.append(f"the client's event loop ran {loop_lag_ms:.0f} ms late (p99): so may its times be")
    return found


def _differ(a: int, b: int) -> bool:
    return abs(a - b) > DIFFERENT * max(a, b)
