"""The requests that are alive, and what each has gained so far.

A `Call` is one HTTP request: the states of its samples, prompt by prompt, and one event that wakes its handler. States
hold the text and ids that have come, and no queue of updates: a slow reader finds one larger update, not many.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from gapless.runtime.core.errors import (
    AbortedError,
    CapacityError,
    ConflictError,
    DeadlineError,
    GaplessError,
    InternalError,
    NotFoundError,
    RequestError,
    TooLargeError,
    UnavailableError,
)
from gapless.runtime.core.messages import (
    Abort,
    Finish,
    Finished,
    Submit,
    TextOutput,
    int32s,
    int64s,
)
from gapless.runtime.tokenizer.pieces import TokenPieces
from gapless.tokenizer_manager.logprobs import RequestLogprobs
from gapless.tokenizer_manager.metrics import Metrics
from gapless.tokenizer_manager.schema import Prompt

LATE_END_SECONDS = 2.0  # for the engine to end what has timed out
_ERRORS: dict[str, type[GaplessError]] = {
    error.code: error
    for error in (
        RequestError, NotFoundError, ConflictError, TooLargeError, CapacityError, AbortedError, UnavailableError,
        InternalError,
    )
}  # fmt: skip


@dataclass(slots=True, eq=False)
class RequestState:
    """One sample of one prompt. `texts` and `ids` are all that came, `finished` ends it."""

    uid: int
    rid: str
    parent: str  # the request id that was given: its own, or one that stands for several samples
    index: int  # in its call
    call: Call
    created: float  # time.monotonic(), seconds
    texts: list[str] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    finished: Finished | None = None
    ended: float = 0.0
    last: float = 0.0  # when its newest ids came
    told: bool = False  # the scheduler has it
    aborted: bool = False  # the scheduler was told to drop it
    timed_out: bool = False
    why: str = ""  # it was ended early, for its client
    sent_ids: int = 0  # of `ids`, in the events so far
    logprobs: RequestLogprobs | None = None  # where asked for, once it was submitted
    embedding: bytes = b""  # float32, as the model has it; where asked for

    def gain(self, text: str, ids: list[int]) -> None:
        if text:
            self.texts.append(text)
        self.ids += ids
        interval = self.call.interval
        if interval and ids and (not self.sent_ids or len(self.ids) - self.sent_ids >= interval):
            self.call.wake(self)

    def end(self, finished: Finished) -> None:
        self.finished, self.ended = finished, time.monotonic()
        self.prompt_tokens, self.cached_tokens = finished.prompt_tokens, finished.cached_tokens
        self.call.wake(self)

    def error(self) -> GaplessError | None:
        """Why there is no answer: a failure, or a timeout before any output. An abort is an answer."""
        if self.finished is None:
            return None
        if self.finished.finish == Finish.FAILED:
            kind = _ERRORS.get(self.finished.code, InternalError)
            return kind(self.finished.message or "the engine failed")
        if self.finished.finish == Finish.ABORT and self.timed_out and not self.ids:
            return DeadlineError(self.why, param="timeout")
        return None


class Call:
    """The states of one HTTP request.

    `interval` is the least number of new ids between two wake-ups for a state; 0 wakes for its end alone.
    """

    def __init__(self, interval: int) -> None:
        self.interval = interval
        self.states: list[RequestState] = []
        self.abandoned = False  # the client has gone
        self.timer: asyncio.TimerHandle | None = None  # of its timeout
        self._changed: dict[RequestState, None] = {}
        self._event = asyncio.Event()

    def wake(self, state: RequestState) -> None:
        self._changed[state] = None
        self._event.set()

    def abandon(self) -> None:
        self.abandoned = True
        self._event.set()

    async def changed(self) -> list[RequestState]:
        """Waits for the states that have something new, each once, in order; none: the client has gone."""
        while not (self._changed or self.abandoned):
            self._event.clear()
            await self._event.wait()
        changed, self._changed = list(self._changed), {}
        return [] if self.abandoned else changed


class Registry:
    """All live requests, from before their tokenization to their terminal message. For one event loop."""

    def __init__(self, send: Callable[[Submit | Abort], None], capacity: int) -> None:
        self._send = send
        self._capacity = capacity
        self.metrics = Metrics()
        self._newest = time.monotonic()  # when the last ids came; the very object in the states that got some
        self._uids = itertools.count(1)
        self._live: dict[int, RequestState] = {}
        # Whom a request id stands for, its own or the one that was given, so that an abort of it reaches just them.
        self._named: dict[str, set[RequestState]] = {}
        self._calls: set[Call] = set()
        self.idle = asyncio.Event()  # no handler is at work
        self.idle.set()
        self.empty = asyncio.Event()  # no request is alive
        self.empty.set()

    def __len__(self) -> int:
        return len(self._live)

    def open(
        self,
        prompts: Sequence[Prompt],
        interval: int,
        timeout: float | None = None,
        *,
        beyond_limit: bool = False,
    ) -> Call:
        """Takes the prompts' request ids and room for their samples, all or none.

        What has not ended `timeout` seconds later is aborted. Raises ConflictError, and CapacityError unless
        `beyond_limit`.
        """
        rids = [(prompt.rid, rid) for prompt in prompts for rid in prompt.rids]
        names = {rid for _, rid in rids}
        parents = {parent for parent, rid in rids if parent != rid}
        if len(names) < len(rids) or parents & names:
            raise ConflictError("a request id stands twice in the request", param="rid")
        if taken := (names | parents) & self._named.keys():
            raise ConflictError(f"request id {min(taken)!r} is still alive", param="rid")
        if len(self._live) + len(rids) > self._capacity and not beyond_limit:
            raise CapacityError(
                f"{len(self._live)} requests are alive; with {len(rids)} more the limit of {self._capacity} "
                "(--max-queued-requests) is passed"
            )
        call, now = Call(interval), time.monotonic()
        for index, (parent, rid) in enumerate(rids):
            state = RequestState(next(self._uids), rid, parent, index, call, now)
            call.states.append(state)
            self._live[state.uid] = state
            for name in {rid, parent}:
                self._named.setdefault(name, set()).add(state)
        self._calls.add(call)
        if timeout is not None:
            call.timer = asyncio.get_running_loop().call_later(timeout, self._expire, call, timeout)
        self.idle.clear()
        self.empty.clear()
        return call

    def submit(self, call: Call, messages: Sequence[Submit], pieces: TokenPieces | None = None) -> None:
        """Hands the call's samples to the scheduler, in order, unless they have ended meanwhile.

        `pieces` are needed where log probabilities come with texts.
        """
        for state, message in zip(call.states, messages, strict=True):
            if state.uid in self._live:
                state.told = True
                if (wanted := message.logprobs) is not None:
                    texts = pieces if wanted.text else None
                    state.logprobs = RequestLogprobs(wanted, message.input_ids, texts)
                self._send(message)

    def abort(self, call: Call) -> None:
        """The client has gone: each sample that still runs is aborted, once, and dropped when its end has come."""
        call.abandon()
        self._abort(call.states, "the client has gone")

    def abort_named(self, rid: str) -> int:
        """Aborts whom `rid` stands for, a sample or all samples of a prompt or batch; how many that were."""
        named = sorted(self._named.get(rid, ()), key=lambda state: state.uid)
        return self._abort(named, "aborted by request")

    def abort_all(self) -> int:
        """Aborts every live request; how many that were."""
        return self._abort(list(self._live.values()), "aborted by request, with all others")

    def _abort(self, states: Sequence[RequestState], why: str) -> int:
        """The scheduler says when each has ended, once it has it; else it ends here and now."""
        count = 0
        for state in states:
            if state.uid not in self._live or state.aborted:
                continue
            count += 1
            state.why = why
            if state.told:
                state.aborted = True
                self._send(Abort(state.uid))
            else:
                self._end_here(state, Finish.ABORT)
        return count

    def _expire(self, call: Call, timeout: float) -> None:
        """The call's timeout is over."""
        for state in call.states:
            state.timed_out = state.uid in self._live and not state.aborted
        self._abort(call.states, f"the request's timeout of {timeout:g} s is over")
        call.timer = asyncio.get_running_loop().call_later(LATE_END_SECONDS, self._give_up, call)

    def _give_up(self, call: Call) -> None:
        """The engine hangs: it has not ended what it was told to end."""
        for state in call.states:
            if state.uid in self._live:
                self._end_here(state, Finish.ABORT)

    def close(self, call: Call) -> None:
        """The handler is done with the call, whatever its end was."""
        if call.timer is not None:
            call.timer.cancel()
        self.abort(call)
        self._calls.discard(call)
        if not self._calls:
            self.idle.set()

    def apply(self, output: TextOutput) -> None:
        """Gives every named request what it gained; what names a request that is not alive is dropped."""
        for uid, prompt_tokens, cached_tokens in output.opened:
            if (state := self._live.get(uid)) is not None:
                if not state.prompt_tokens:
                    self.metrics.in_queue.observe(time.monotonic() - state.created)
                state.prompt_tokens, state.cached_tokens = prompt_tokens, cached_tokens
        ids, at = int32s(output.ids).tolist(), 0
        rows = zip(int64s(output.uids).tolist(), output.texts, int32s(output.counts).tolist(), strict=True)
        now, steady = time.monotonic(), 0
        for uid, text, count in rows:
            if (state := self._live.get(uid)) is not None:
                state.gain(text, ids[at : at + count])
                if count:
                    if state.last is self._newest and count == 1:
                        steady += 1
                    else:
                        self._came(state, now, count)
                    state.last = now
            at += count
        if ids:
            self.metrics.stepped(len(ids), now - self._newest, steady)
            self._newest = now
        for uid, of_prompt, found in output.logprobs:
            state = self._live.get(uid)
            if state is not None and found.embedding:
                state.embedding = found.embedding
            if state is None or state.logprobs is None:
                continue
            if of_prompt:
                state.logprobs.add_prompt(found)
            else:
                state.logprobs.add_output(found, state.ids)
        for finished in output.finished:
            if (state := self._live.get(finished.uid)) is not None:
                self._end(state, finished)

    def _came(self, state: RequestState, now: float, count: int) -> None:
        """For the metrics: a request gained its first ids, several, or not those of the last step."""
        if state.last:
            self.metrics.between_tokens.observe((now - state.last) / count, count)
        else:
            self.metrics.first_token.observe(now - state.created)

    def fail_all(self, error: GaplessError) -> None:
        """Nothing more will come: ends every request with `error`."""
        for state in list(self._live.values()):
            self._end_here(state, Finish.FAILED, error.message, error.code)

    def _end_here(self, state: RequestState, finish: Finish, message: str = "", code: str = "") -> None:
        """Ends a live request without the engine's word: it has none to give."""
        counts = (state.prompt_tokens, len(state.ids), state.cached_tokens)
        self._end(state, Finished(state.uid, finish, None, message, code, *counts))

    def _end(self, state: RequestState, finished: Finished) -> None:
        self._drop(state)
        state.end(finished)
        seconds = state.ended - state.created
        self.metrics.ended(finished.finish, seconds, finished.prompt_tokens, finished.cached_tokens)

    def _drop(self, state: RequestState) -> None:
        del self._live[state.uid]
        for name in {state.rid, state.parent}:
            self._named[name].discard(state)
            if not self._named[name]:
                del self._named[name]
        if not self._live:
            self.empty.set()
