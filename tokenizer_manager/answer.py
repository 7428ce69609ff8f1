"""What a request has gained, in the form of SGLang's responses."""

from __future__ import annotations

from typing import Any

from gapless.runtime.core.messages import Finish
from gapless.tokenizer_manager.states import RequestState


def whole_answer(state: RequestState) -> dict[str, Any]:
    """All that came."""
    return _answer(state, "".join(state.texts), 0, 0)


def next_chunk(state: RequestState, incremental: bool) -> dict[str, Any]:
    """The next event of a stream: what came since the last one where `incremental`, else all that came."""
    text, logprobs = "".join(state.texts), state.logprobs
    first, first_of_prompt = state.sent_ids, logprobs.sent_prompt if logprobs else 0
    if incremental:
        state.texts.clear()
    else:
        state.texts[:] = [text]
        first = first_of_prompt = 0
    state.sent_ids = len(state.ids)
    if logprobs:
        logprobs.sent_prompt = len(logprobs.prompt.tokens)
    return _answer(state, text, first, first_of_prompt)


def _answer(state: RequestState, text: str, first: int, first_of_prompt: int) -> dict[str, Any]:
    """With the output ids from number `first` on, and their log probabilities; with those of the prompt likewise."""
    meta: dict[str, Any] = {
        "id": state.rid,
        "finish_reason": _finish_reason(state),
        "prompt_tokens": state.prompt_tokens,
        "completion_tokens": len(state.ids),
        "cached_tokens": state.cached_tokens,
    }
    if state.finished is not None:
        meta["e2e_latency"] = state.ended - state.created
    if state.logprobs is not None:
        meta |= state.logprobs.fields(first_of_prompt, first)
    return {"text": text, "output_ids": state.ids[first:], "meta_info": meta}


def _finish_reason(state: RequestState) -> dict[str, Any] | None:
    """SGLang's form; None while the request goes on."""
    finished = state.finished
    if finished is None:
        return None
    match finished.finish:
        case Finish.LENGTH:
            return {"type": "length", "length": finished.completion_tokens}
        case Finish.ABORT:
            return {"type": "abort", "message": state.why or finished.message or "aborted"}
        case _:
            return {"type": "stop", "matched": finished.matched}
