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
