"""The figures of one run: counts, rates and latencies, from the records of its measured requests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from gapless.bench.serve.goodput import Goodput
from gapless.bench.serve.record import Record

DEFINITIONS = """\
A request counts once: as completed, as failed, or as cut (still running when the run's time was up). Tokens, rates,
latencies and concurrency are of the completed ones alone. A chunk is a piece of a stream that brought tokens; empty
ones and those with a role alone are none.
  TTFT         first chunk - sent
  E2E          last chunk - sent
  TPOT         (E2E - TTFT) / (n - 1), once a request, with n the server's count of its output tokens; n <= 1 has none
  ITL          the gap before a chunk, shared equally among the chunk's tokens, once a token; the first chunk has
               none: the wait for it is TTFT, however many tokens it brings
  chunk gap    the gap before a chunk, not shared, once a chunk after the first
  send lag     sent - due, of every request: how late the client was
  concurrency  sum of E2E / duration
  goodput      completed requests within every limit / duration; their share is of the requests known to keep or miss
               the limits: completed, failed, and cut ones that were already past one
Percentiles are interpolated linearly, as numpy does; std is that of the population."""

STATISTICS = ("mean", "median", "std", "min", "p90", "p95", "p99", "max")
MAX_ERRORS, MAX_ERROR_CHARS = 10, 200

Seconds = npt.NDArray[np.float64]
Bucket = Literal["completed", "failed", "cut"]


@dataclass(frozen=True, slots=True)
class Times:
    """The latencies of one request, in seconds; None or empty where it has none."""

    ttft: float | None
    tpot: float | None
    e2e: float  # of a cut request: up to the cut
    gaps: Seconds  # between chunks
    itls: Seconds  # one a token after the first chunk


def bucket(record: Record) -> Bucket:
    if record.cut:
        return "cut"
    return "failed" if record.error else "completed"


def times(record: Record) -> Times:
    at = np.array([chunk.at for chunk in record.chunks])
    gaps = np.diff(at)
    tokens = np.array([chunk.tokens for chunk in record.chunks[1:]], np.int64)
    ttft = float(at[0] - record.sent) if len(at) else None
    end = float(at[-1]) if len(at) and not record.cut else record.ended
    e2e, later = end - record.sent, record.output_tokens - 1
    tpot = (e2e - ttft) / later if ttft is not None and later > 0 else None
    return Times(ttft, tpot, e2e, gaps, np.repeat(gaps / np.maximum(tokens, 1), tokens))


def summarize(records: Sequence[Record], duration: float, goodput: Goodput | None = None) -> dict[str, Any]:
    """The report's figures, under the keys of SGLang's bench_serving where it has one.

    `records` are all requests that were sent and are to be measured, `duration` the seconds of the run, above 0.
    Figures that nothing is known of are None: every latency where no request completed.
    """
    measured = [(record, times(record)) for record in records]
    completed = [record for record in records if record.completed]
    latencies = [t for record, t in measured if record.completed]
    counts = Counter(map(bucket, records))
    tokens = _tokens(completed)
    total_in, total_out = tokens["total_input_tokens"], tokens["total_output_tokens"]
    retokenized = tokens["total_output_tokens_retokenized"]
    return {
        "duration": duration,
        **{name: counts[name] for name in ("completed", "failed", "cut")},
        **tokens,
        "cut_output_tokens": sum(_chunk_tokens(record) for record in records if record.cut),
        "request_throughput": len(completed) / duration,
        "input_throughput": total_in / duration,
        "output_throughput": total_out / duration,
        "output_throughput_retokenized": None if retokenized is None else retokenized / duration,
        "total_throughput": (total_in + total_out) / duration,
        **_statistics("ttft", [t.ttft for t in latencies if t.ttft is not None]),
        **_statistics("tpot", [t.tpot for t in latencies if t.tpot is not None]),
        **_statistics("itl", _joined(t.itls for t in latencies)),
        **_statistics("chunk_gap", _joined(t.gaps for t in latencies)),
        **_statistics("e2e_latency", [t.e2e for t in latencies]),
        **_statistics("send_lag", [record.sent - record.due for record in records]),
        "concurrency": sum(t.e2e for t in latencies) / duration,
        **_goodput(measured, duration, goodput),
        "error_counts": _error_counts(record for record in records if bucket(record) == "failed"),
    }


def details(records: Sequence[Record]) -> dict[str, list[Any]]:
    """Lists with an entry a request, in seconds, by SGLang's and vLLM's names; 0 is a TTFT that there is none of.

    `errors` is empty for a completed request alone.
    """
    all_times = [times(record) for record in records]
    return {
        "input_lens": [_prompt_tokens(record) for record in records],
        "output_lens": [record.output_tokens for record in records],
        "start_times": [record.sent for record in records],
        "ttfts": [t.ttft or 0.0 for t in all_times],
        "e2e_latencies": [t.e2e for t in all_times],
        "itls": [t.itls.tolist() for t in all_times],
        "generated_texts": [record.text for record in records],
        "errors": ["cut: the run's time was up" if record.cut else record.error for record in records],
    }


def _prompt_tokens(record: Record) -> int:
    return record.prompt_len if record.prompt_tokens is None else record.prompt_tokens


def _chunk_tokens(record: Record) -> int:
    return sum(chunk.tokens for chunk in record.chunks)


def _tokens(completed: Sequence[Record]) -> dict[str, Any]:
    """What was asked, what came, and what the server says of its cache."""
    telling = [record for record in completed if record.cached_tokens is not None]
    cached = sum(record.cached_tokens or 0 for record in telling)
    prompts = sum(map(_prompt_tokens, telling))
    return {
        "total_input_tokens": sum(map(_prompt_tokens, completed)),
        "asked_input_tokens": sum(record.prompt_len for record in completed),
        "total_output_tokens": sum(record.output_tokens for record in completed),
        "total_output_tokens_retokenized": sum(record.retokenized for record in completed) or None,
        "asked_output_tokens": sum(record.output_len for record in completed),
        "chunk_output_tokens": sum(map(_chunk_tokens, completed)),
        "early_stops": sum(record.output_tokens < record.output_len for record in completed),
        "finish_reasons": dict(Counter(record.finish_reason or "unknown" for record in completed)),
        "single_token": sum(record.output_tokens <= 1 for record in completed),
        "single_chunk": sum(len(record.chunks) == 1 and record.output_tokens > 1 for record in completed),
        "without_usage": sum(record.completion_tokens is None for record in completed),
        "cached_tokens": cached if telling else None,
        "cache_hit_rate": cached / prompts if prompts else None,
    }


def _joined(parts: Iterable[Seconds]) -> Seconds:
    return np.concatenate([np.empty(0), *parts])


def _statistics(name: str, seconds: Sequence[float] | Seconds) -> dict[str, float | None]:
    """`mean_{name}_ms` and the others, in milliseconds."""
    keys = [f"{statistic}_{name}_ms" for statistic in STATISTICS]
    if not len(seconds):
        return dict.fromkeys(keys)
    ms = 1000 * np.asarray(seconds)
    median, p90, p95, p99 = np.percentile(ms, (50, 90, 95, 99))
    values = (ms.mean(), median, ms.std(), ms.min(), p90, p95, p99, ms.max())
    return dict(zip(keys, map(float, values), strict=True))


def _goodput(
    measured: Sequence[tuple[Record, Times]], duration: float, goodput: Goodput | None
) -> dict[str, Any]:
    if goodput is None:
        return {"goodput": None, "goodput_share": None, "goodput_limits": {}}
    kept = Counter((bucket(record), _kept(record, t, goodput)) for record, t in measured)
    good = kept["completed", True]
    known = kept.total() - kept["cut", True]
    return {
        "goodput": good / duration,
        "goodput_share": good / known if known else None,
        "goodput_limits": goodput.limits(),
    }


def _kept(record: Record, t: Times, goodput: Goodput) -> bool:
    """Whether the request kept the limits; a cut one, whether it had not missed any by then."""
    if record.cut:
        return goodput.met(t.e2e if t.ttft is None else t.ttft, None, t.e2e)
    return record.completed and goodput.met(t.ttft, t.tpot, t.e2e)


def _error_counts(failed: Iterable[Record]) -> dict[str, int]:
    """How often each message came; the rarest are put together where there are many."""
    counts = Counter(record.error[:MAX_ERROR_CHARS] for record in failed)
    common = dict(counts.most_common(MAX_ERRORS))
    others = counts.total() - sum(common.values())
    return common | ({"others": others} if others else {})
