"""Counters and histograms of what the front sees, and GET /metrics in Prometheus' text format.

Names and meanings are SGLang's, so that its dashboards work. Rates are over the last ten seconds.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import accumulate

from gapless.runtime.core.messages import Finish, Heartbeat

_WINDOW_SECONDS = 10.0
_FIRST_TOKEN = (.01, .025, .05, .1, .2, .4, .6, .8, 1, 2, 4, 6, 8, 10, 20, 40, 60, 80, 100, 200, 400)  # fmt: skip
_BETWEEN_TOKENS = (
    .002, .004, .006, .008, .01, .015, .02, .025, .03, .035, .04, .06, .08, .1, .2, .4, .6, .8, 1, 2, 4, 6, 8,
)  # fmt: skip
_WHOLE_REQUEST = (
    .1, .2, .4, .6, .8, 1, 2, 4, 6, 8, 10, 20, 40, 60, 80, 100, 200, 400, 600, 1200, 1800, 2400,
)  # fmt: skip
_IN_QUEUE = (0.0, *_FIRST_TOKEN)


class Histogram:
    """Cumulative buckets of seconds; the last one, beyond every bound, is +Inf."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self._counts[bisect_left(self._bounds, value)] += times
        self.sum += value * times

    def lines(self, name: str, labels: str) -> Iterator[str]:
        totals = list(accumulate(self._counts))
        for bound, total in zip([*map("{:g}".format, self._bounds), "+Inf"], totals, strict=True):
            yield f'{name}_bucket{{{labels},le="{bound}"}} {total}'
        yield f"{name}_sum{{{labels}}} {self.sum:.9g}"
        yield f"{name}_count{{{labels}}} {totals[-1]}"


class Metrics:
    """Fed by the registry of requests."""

    def __init__(self) -> None:
        self.requests = self.aborted = self.prompt_tokens = self.cached_tokens = self.generation_tokens = 0
        self.first_token = Histogram(_FIRST_TOKEN)
        self.between_tokens = Histogram(_BETWEEN_TOKENS)
        self.whole_request = Histogram(_WHOLE_REQUEST)
        self.in_queue = Histogram(_IN_QUEUE)
        # (seconds, generation, prompt and cached tokens) of a moment, oldest first
        self._moments: deque[tuple[float, int, int, int]] = deque()

    def stepped(self, tokens: int, gap: float, steady: int) -> None:
        """A step gave `tokens`; `steady` requests gained one id now and one in the step before, `gap` seconds ago.

        In a run of decode steps that is all of them: they cost one observation, not one each.
        """
        self.generation_tokens += tokens
        if steady:
            self.between_tokens.observe(gap, steady)

    def ended(self, finish: int, seconds: float, prompt_tokens: int, cached_tokens: int) -> None:
        """A request has ended, `seconds` after it came."""
        self.requests += 1
        self.aborted += finish == Finish.ABORT
        self.prompt_tokens += prompt_tokens
        self.cached_tokens += cached_tokens
        self.whole_request.observe(seconds)

    def beat(self, now: float) -> None:
        """Remembers this moment, for the rates; called with every heartbeat."""
        self._moments.append((now, self.generation_tokens, self.prompt_tokens, self.cached_tokens))
        while now - self._moments[0][0] > _WINDOW_SECONDS:
            self._moments.popleft()

    def rates(self) -> tuple[float, float]:
        """(tokens generated per second, share of the ended requests' prompt tokens that were cached)."""
        if len(self._moments) < 2:
            return 0.0, 0.0
        (then, generated, prompt, cached), last = self._moments[0], self._moments[-1]
        share = (last[3] - cached) / max(last[2] - prompt, 1)
        return (last[1] - generated) / (last[0] - then), share

    def text(self, model_name: str, heartbeat: Heartbeat, max_total_tokens: int) -> str:
        """All of them, in Prometheus' text format."""
        escaped = model_name.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
        labels = f'model_name="{escaped}"'
        lines: list[str] = []
        for kind, group in (
            ("gauge", self._gauges(heartbeat, max_total_tokens)),
            ("counter", self._counters()),
        ):
            for name, (value, help) in group.items():
                number = value if isinstance(value, int) else f"{value:.9g}"
                lines += [*_head(name, kind, help), f"sglang:{name}{{{labels}}} {number}"]
        for name, (histogram, help) in self._histograms().items():
            lines += [*_head(name, "histogram", help), *histogram.lines(f"sglang:{name}", labels)]
        return "\n".join(lines) + "\n"

    def _gauges(self, heartbeat: Heartbeat, max_total_tokens: int) -> dict[str, tuple[float, str]]:
        throughput, hit_rate = self.rates()
        return {
            "num_running_reqs": (heartbeat.running, "Requests that run"),
            "num_queue_reqs": (heartbeat.waiting, "Requests that wait for a place in the batch"),
            "num_used_tokens": (heartbeat.used_tokens, "Tokens of the KV pool in use"),
            "max_total_num_tokens": (max_total_tokens, "Tokens in the KV pool"),
            "token_usage": (heartbeat.used_tokens / max(max_total_tokens, 1), "Share of the KV pool in use"),
            "num_retracted_reqs": (heartbeat.preemptions, "Preemptions of running requests so far"),
            "cache_hit_rate": (hit_rate, "Share of prompt tokens found in the prefix cache, last 10 s"),
            "gen_throughput": (throughput, "Tokens generated per second, last 10 s"),
        }

    def _counters(self) -> dict[str, tuple[int, str]]:
        return {
            "prompt_tokens_total": (self.prompt_tokens, "Prompt tokens of ended requests"),
            "cached_tokens_total": (self.cached_tokens, "Those of them found in the prefix cache"),
            "generation_tokens_total": (self.generation_tokens, "Tokens generated"),
            "num_requests_total": (self.requests, "Requests that have ended"),
            "num_aborted_requests_total": (self.aborted, "Those of them that were aborted"),
        }

    def _histograms(self) -> dict[str, tuple[Histogram, str]]:
        return {
            "time_to_first_token_seconds": (self.first_token, "From a request's arrival to its first token"),
            "inter_token_latency_seconds": (self.between_tokens, "Between tokens of a request"),
            "e2e_request_latency_seconds": (self.whole_request, "From a request's arrival to its end"),
            "queue_time_seconds": (self.in_queue, "From a request's arrival to its place in the batch"),
        }


def _head(name: str, kind: str, help: str) -> list[str]:
    return [f"# HELP sglang:{name} {help}.", f"# TYPE sglang:{name} {kind}"]
