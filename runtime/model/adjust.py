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

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

if TYPE_CHECKING:
    from gapless.runtime.core.plan import SlotSetup
    from gapless.runtime.core.sampling import SamplingParams

_LIMITS = torch.finfo(torch.float32)
_FIRST_ROOM = 64  # output tokens


@dataclass
class _Slot:
    """One request. `tokens` are those of its prompt, each once, then what was sampled: never a placeholder."""

    params: SamplingParams
    tokens: Tensor  # int64, with room to spare
    prompt_tokens: int
    biased: tuple[Tensor, Tensor]  # ids and what is added to their logits
    ending: Tensor  # ids that end the request


class Adjustments:
    """The state of all slots whose requests change their logits, on the device. Nothing here waits for the device.

    Work grows with a request's tokens, not with the vocabulary, but for one copy. Indices may repeat: what they write
    to the same place is the same value.
    """

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._vocab_size, self._device = vocab_size, device
        self._scores = torch.empty(vocab_size, device=device)
        self._counts = torch.zeros(vocab_size, device=device)  # zero between calls
        self._one = torch.ones(1, device=device)
        self._slots: dict[int, _Slot] = {}

    def open(self, setup: SlotSetup) -> None:
        """A new request has the slot: nothing of the one before it is left."""
        params = setup.params
        prompt = np.unique(setup.prompt if params.repetition_penalty != 1 else setup.prompt[:0])
        tokens = self._ids(np.concatenate([prompt, np.zeros(_FIRST_ROOM)]))
        bias = self._upload(np.array(list(params.logit_bias.values()), np.float32))
        known = [token for token in setup.stop_ids if token < self._vocab_size]  # a tokenizer may have more
        biased = self._ids(list(params.logit_bias)), bias
        self._slots[setup.slot] = _Slot(params, tokens, len(prompt), biased, self._ids(known))

    def apply(self, slot: int, logits: Tensor, output_index: int) -> Tensor:
        """The adjusted copy, float32 [V], of logits [V] for the output token after the first `output_index`.

        The next call overwrites it.
        """
        state, scores = self._slots[slot], self._scores.copy_(logits)
        params, end = state.params, state.prompt_tokens + output_index
        if params.frequency_penalty or params.presence_penalty:
            output = state.tokens[state.prompt_tokens : end]
            self._counts.index_add_(0, output, self._one.expand(output_index))
            scores[output] -= params.frequency_penalty * self._counts[output] + params.presence_penalty
            self._counts.index_fill_(0, output, 0)
        if params.repetition_penalty != 1:
            seen, penalty = state.tokens[:end], max(params.repetition_penalty, _LIMITS.tiny)
            z = scores[seen]
            scores[seen] = torch.where(z < 0, z * penalty, z / penalty).clamp_(max=_LIMITS.max)
        scores.index_add_(0, *state.biased)
        if output_index < params.min_new_tokens:
            z = scores[state.ending]
            scores.index_fill_(0, state.ending, -math.inf)
            scores[state.ending] = torch.where(scores.max() > -math.inf, -math.inf, z)
        return scores

    def record(self, slot: int, output_index: int, token: Tensor) -> None:
        """`token`, int64 [1], was sampled for the slot's request after `output_index` others."""
        state = self._slots[slot]
        place = state.prompt_tokens + output_index
        if place == len(state.tokens):
            state.tokens = torch.cat([state.tokens, torch.empty_like(state.tokens)])
        state.tokens[place : place + 1] = token

    def _ids(self, values: object) -> Tensor:
        return self._upload(np.asarray(values, np.int64))

    def _upload(self, values: NDArray[Any]) -> Tensor:
        """A copy from pageable memory would wait for all that the device has been given before."""
        tensor = torch.from_numpy(values)
        if self._device.type == "cuda":
            tensor = tensor.pin_memory()
        return tensor.to(self._device, non_blocking=True)
