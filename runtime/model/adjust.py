"""What a request asks to be changed in its logits before a token is picked from them.

In this order, which is SGLang's; z is the logit of a token, and only output tokens have a count:

    frequency_penalty f, presence_penalty p   z -= f * count + (p if count > 0), as OpenAI's API defines them
    repetition_penalty r                      z = z / r, or z * r where z < 0, for tokens of the prompt and the output
                                              (Keskar et al., "CTRL", 2019, with the sign as in transformers)
    logit_bias                                z += bias
    min_new_tokens                            z = -inf for ids that end the request, until the output has that length

Temperature and the filters come after them. A grammar's mask is minus infinity before and after any of these. Where it
leaves only ids that end the request, min_new_tokens gives way.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from gapless.runtime.core.plan import SlotSetup
    from gapless.runtime.core.sampling import SamplingParams

_LIMITS = torch.finfo(torch.float32)


@dataclass
class _Slot:
    """One request. Counts are those of sampled tokens, so that no placeholder is ever among them."""

    params: SamplingParams
    counts: Tensor | None  # float32 [V], how often the output has each token
    seen: Tensor | None  # bool [V], tokens of the prompt and the output
    biased: tuple[Tensor, Tensor] | None  # ids and what is added to their logits
    ending: Tensor | None  # ids that end the request


class Adjustments:
    """The state of all slots whose requests change their logits, on the device. Nothing here waits for the device."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._vocab_size, self._device = vocab_size, device
        self._slots: dict[int, _Slot] = {}

    def open(self, setup: SlotSetup) -> None:
        """A new request has the slot: nothing of the one before it is left."""
        params, device, size = setup.params, self._device, self._vocab_size
        counts = seen = biased = ending = None
        if params.frequency_penalty or params.presence_penalty:
            counts = torch.zeros(size, device=device)
        if params.repetition_penalty != 1:
            seen = torch.zeros(size, dtype=torch.bool, device=device)
            seen[torch.tensor(setup.prompt, dtype=torch.int64, device=device)] = True
        if params.logit_bias:
            biased = (
                torch.tensor(list(params.logit_bias), device=device),
                torch.tensor(list(params.logit_bias.values()), device=device),
            )
        if params.min_new_tokens:
            known = [
                token for token in setup.stop_ids if token < size
            ]  # a tokenizer may have more than the model
            ending = torch.tensor(known, dtype=torch.int64, device=device)
        self._slots[setup.slot] = _Slot(params, counts, seen, biased, ending)

    def apply(self, slot: int, logits: Tensor, output_index: int) -> Tensor:
        """The adjusted copy, float32 [V], of logits [V] for the output token after the first `output_index`."""
        state, scores = self._slots[slot], logits.to(torch.float32, copy=True)
        params = state.params
        if state.counts is not None:
            scores -= params.frequency_penalty * state.counts
            scores -= params.presence_penalty * (state.counts > 0)
        if state.seen is not None:
            penalty = max(params.repetition_penalty, _LIMITS.tiny)
            scaled = torch.where(scores < 0, scores * penalty, scores / penalty).clamp_(max=_LIMITS.max)
            scores = torch.where(state.seen, scaled, scores)
        if state.biased is not None:
            scores.index_add_(0, *state.biased)
        if state.ending is not None and output_index < params.min_new_tokens:
            going_on = scores.index_fill(0, state.ending, float("-inf"))
            scores = torch.where(going_on.max() > float("-inf"), going_on, scores)
        return scores

    def count(self, slot: int, token: Tensor) -> None:
        """The slot's request has gained `token`, int64 [1]."""
        state = self._slots[slot]
        if state.counts is not None:
            state.counts[token] += 1
        if state.seen is not None:
            state.seen[token] = True
