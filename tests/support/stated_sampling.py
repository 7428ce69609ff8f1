"""What the sampling fields mean, stated token by token in float64."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

from gapless.runtime.core.sampling import SamplingParams


def adjusted_logits(
    logits: Sequence[float],
    params: SamplingParams,
    prompt: Sequence[int],
    output: Sequence[int],
    stop_ids: Collection[int] = (),
    allowed: Collection[int] | None = None,
) -> list[float]:
    """`logits` as they are sampled from after `output`; `allowed` are the ids that a grammar leaves."""
    z = [float(value) for value in logits]
    for token in range(len(z)):
        z[token] -= params.frequency_penalty * output.count(token)
        z[token] -= params.presence_penalty * (token in output)
        if token in prompt or token in output:
            r = params.repetition_penalty
            z[token] = z[token] * r if z[token] < 0 else z[token] / r
        z[token] += params.logit_bias.get(token, 0)
        if allowed is not None and token not in allowed:
            z[token] = -math.inf
    if len(output) < params.min_new_tokens:
        going_on = [-math.inf if token in stop_ids else z[token] for token in range(len(z))]
        if max(going_on) > -math.inf:
            return going_on
    return z


def drawn(z: Sequence[float], params: SamplingParams, uniform: float) -> int:
    """The token that `uniform` of [0, 1) draws from adjusted logits.

    What top_k, top_p and min_p keep of softmax(z / temperature) lies end to end: by id, or the best first (the lower id
    first of equals) where top_k or top_p is given. It must not lie within 1e-6 of an edge, where float32 may differ.
    """
    weights = [math.exp((value - max(z)) / params.temperature) for value in z]
    total = math.fsum(weights)
    best_first = sorted(range(len(z)), key=lambda token: (-weights[token], token))
    kept, before = [], 0.0
    for rank, token in enumerate(best_first):
        enough = before > params.top_p * total or rank == params.top_k
        if enough or weights[token] < params.min_p:
            break
        kept.append(token)
        before += weights[token]
    if params.top_k < 1 and params.top_p == 1:
        kept.sort()
    target, end = uniform * before, 0.0
    for token in kept:
        end += weights[token]
        assert abs(target - end) > 1e-6 * before or token == kept[-1], "at an edge: take another seed"
        if target < end:
            return token
    raise AssertionError("beyond the end")
