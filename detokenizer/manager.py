"""Turns a step's ids into what each request gained, and decides how each request ends.

The detokenizer is the only author of terminal messages. It sees a request's ids, the scheduler's finishes and the
stop strings in one order, so that exactly one `Finished` goes out for a uid whatever is late or comes twice.
"""

from __future__ import annotations

from collections import deque

from gapless.detokenizer.stop import Match, StopMatcher
from gapless.detokenizer.text import IncrementalText, Vocabulary
from gapless.runtime.core.logprobs import Logprobs
from gapless.runtime.core.messages import (
    Closed,
    Finish,
    Finished,
    Opened,
    StepOutput,
    Stop,
    TextOutput,
    column,
    int32s,
    uint8s,
)
from gapless.runtime.tokenizer.pieces import TokenPieces

_REMEMBERED = 1 << 16  # finished requests whose late messages are still recognised


class DetokenizerManager:
    """All live requests, without sockets: feed it every StepOutput in order."""

    def __init__(self, pieces: TokenPieces) -> None:
        self._vocabulary = Vocabulary(pieces)
        self._live: dict[int, _Request] = {}  # by uid
        self._slots: dict[int, _Request] = {}  # the live request that a slot's rows belong to
        self._finished: dict[int, int] = {}  # uid to output length, oldest first

    def __len__(self) -> int:
        return len(self._live)

    def handle(self, step: StepOutput) -> tuple[TextOutput, list[Stop]]:
        """What goes to the front, and the stop strings that the scheduler must hear of."""
        out = _Output()
        for opened in step.opened:
            self._open(opened, out)
        scored = self._sort_logprobs(step, out) if step.logprobs else None
        rows = (int32s(step.slots), int32s(step.generations), int32s(step.ids), uint8s(step.finish))
        for slot, generation, token_id, finish in zip(*(r.tolist() for r in rows), strict=True):
            request = self._slots.get(slot)
            if request is not None and request.generation == generation:
                self._row(request, token_id, finish, out)
                if scored and (found := scored.get((slot, generation))):
                    out.logprobs.append((request.opened.uid, False, found.popleft()))
        for closed in step.closed:
            self._close(closed, out)
        return out.message(), out.stops

    def _open(self, opened: Opened, out: _Output) -> None:
        """A new request, or a known one that comes back from preemption in another slot."""
        uid, slot, generation = opened.uid, opened.slot, opened.generation
        self._slots.pop(slot, None)  # whoever had the slot has left it
        if uid in self._finished:  # its stop string was found while it was on its way back
            out.stops.append(Stop(slot, generation, self._finished[uid]))
            return
        request = self._live.get(uid)
        if request is None:
            request = self._live[uid] = _Request(opened, self._vocabulary)
            out.opened.append((uid, opened.prompt_tokens, opened.cached_tokens))
        else:
            self._unbind(request)
            request.slot, request.generation = slot, generation
        self._slots[slot] = request

    def _sort_logprobs(self, step: StepOutput, out: _Output) -> dict[tuple[int, int], deque[Logprobs]]:
        """Passes those of prompts on; returns those of rows by (slot, generation), each in the order of its rows."""
        scored: dict[tuple[int, int], deque[Logprobs]] = {}
        for slot, generation, of_prompt, found in step.logprobs:
            request = self._slots.get(slot)
            if not of_prompt:
                scored.setdefault((slot, generation), deque()).append(found)
            elif request is not None and request.generation == generation:
                out.logprobs.append((request.opened.uid, True, found))
        return scored

    def _row(self, request: _Request, token_id: int, finish: int, out: _Output) -> None:
        request.output_len += 1
        trimmed = finish == Finish.STOP_TOKEN and not request.opened.no_stop_trim
        text = "" if trimmed else request.text.push(token_id)
        shown, stop = request.show(text, last=finish != Finish.NONE)
        out.row(request.opened.uid, shown, (token_id,))
        if stop is not None:
            if finish == Finish.NONE:
                out.stops.append(Stop(request.slot, request.generation, request.output_len))
            self._finish(request, Finish.STOP_STRING, out, stop)
        elif finish != Finish.NONE:
            self._finish(request, finish, out, token_id if finish == Finish.STOP_TOKEN else None)

    def _close(self, closed: Closed, out: _Output) -> None:
        uid = closed.uid
        if uid in self._finished:
            return
        request = self._live.get(uid)
        if request is None:  # it never had a slot
            self._remember(uid, 0)
            out.finished.append(
                Finished(uid, closed.finish, None, closed.message, closed.code, closed.prompt_tokens, 0, 0)
            )
            return
        shown, stop = request.show("", last=True)
        if shown:
            out.row(uid, shown, ())
        if stop is not None:
            self._finish(request, Finish.STOP_STRING, out, stop)
        else:
            self._finish(request, closed.finish, out, None, closed.message, closed.code)

    def _finish(
        self,
        request: _Request,
        finish: int,
        out: _Output,
        matched: int | str | None,
        message: str = "",
        code: str = "",
    ) -> None:
        uid, counts = request.opened.uid, (request.opened.prompt_tokens, request.output_len)
        del self._live[uid]
        self._unbind(request)
        self._remember(uid, request.output_len)
        out.finished.append(
            Finished(uid, finish, matched, message, code, *counts, request.opened.cached_tokens)
        )

    def _unbind(self, request: _Request) -> None:
        if self._slots.get(request.slot) is request:
            del self._slots[request.slot]

    def _remember(self, uid: int, output_len: int) -> None:
        self._finished[uid] = output_len
        if len(self._finished) > _REMEMBERED:
            del self._finished[next(iter(self._finished))]


class _Request:
    """A live request: where its rows come from, its text so far and its count of output tokens."""

    __slots__ = ("generation", "matcher", "opened", "output_len", "slot", "text")

    def __init__(self, opened: Opened, vocabulary: Vocabulary) -> None:
        self.opened = opened
        self.slot, self.generation = opened.slot, opened.generation
        self.output_len = 0
        self.text = IncrementalText(vocabulary, opened.skip_special_tokens)
        self.matcher = StopMatcher(opened.stop) if opened.stop else None

    def show(self, text: str, *, last: bool) -> tuple[str, str | None]:
        """What can be shown once `text` has come, and the stop string that it completed, if any."""
        if last:
            text += self.text.flush()
        if self.matcher is None:
            return text, None
        shown = self.matcher.push(text, too_early=self.output_len <= self.opened.min_new_tokens)
        if isinstance(shown, Match):
            return shown.text + (shown.stop if self.opened.no_stop_trim else ""), shown.stop
        return shown + (self.matcher.flush() if last else ""), None


class _Output:
    """A TextOutput in the making, and the stops found on the way."""

    def __init__(self) -> None:
        self.opened: list[tuple[int, int, int]] = []
        self.finished: list[Finished] = []
        self.stops: list[Stop] = []
        self.logprobs: list[tuple[int, bool, Logprobs]] = []
        self._uids: list[int] = []
        self._texts: list[str] = []
        self._counts: list[int] = []
        self._ids: list[int] = []

    def row(self, uid: int, text: str, ids: tuple[int, ...]) -> None:
        self._uids.append(uid)
        self._texts.append(text)
        self._counts.append(len(ids))
        self._ids.extend(ids)

    def message(self) -> TextOutput:
        return TextOutput(
            column(self._uids, "<i8"),
            self._texts,
            column(self._counts, "<i4"),
            column(self._ids, "<i4"),
            self.finished,
            self.opened,
            self.logprobs,
        )
