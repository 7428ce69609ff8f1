"""The device thread's side of the CUDA device: it enqueues steps and waits for none of them.

    inputs    | plan N+1 to the device ->copied |
    compute   | wait copied | started-> setups, copies, page table, late sampling, forward, sampling ->ended |
    results   | wait | late ids to the host ->arrived |            | wait ended | ids to the host ->arrived |

Plans and ids have streams of their own, one for each direction: in one stream, the copy of plan N+1 would stand behind
that of the ids of step N, and so behind step N. Copies of KV pages, to host memory too, stay in the compute stream: the
steps around them use the same pages, and the next plan may use again what they have read. All that the model allocates
belongs to the compute stream. What is used across streams is freed only when its launch has been waited for: the plan's
copy lies in the launch's Buffers, and sampled ids are held by their Arrival.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from gapless.overlap.cuda_streams import Event, Stream, Streams
from gapless.overlap.torch_steps import TorchSteps
from gapless.runtime.core.plan import I32, DeviceInfo, Plan

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from gapless.overlap.device import Ids
    from gapless.overlap.plan_tensors import Fields

FIRST_WORDS = (
    1 << 14
)  # of a plan's buffer; more where a plan is larger, but pinning memory takes milliseconds


class Results:
    """Pinned memory for sampled ids and for the words of log probabilities."""

    def __init__(self, streams: Streams, rows: int) -> None:
        import torch

        self._streams = streams
        self.ids = streams.pinned(rows, torch.int64)
        self._words = self.ids.view(torch.int32)[:0]

    def words(self, count: int) -> Tensor:
        import torch

        if count > len(self._words):
            self._words = self._streams.pinned(1 << count.bit_length(), torch.int32)
        return self._words[:count]


class Buffers:
    """The memory of one launch at a time, for its plan and what comes back; free once that launch was waited for."""

    def __init__(self, streams: Streams, device: torch.device, rows: int) -> None:
        """`rows` is the most that can be sampled. The device's part belongs to the stream in use."""

        self._streams, self._device = streams, device
        self.results, self.late_results = Results(streams, rows), Results(streams, rows)
        self._grow(FIRST_WORDS)

    def send(self, plan: Plan) -> Tensor:
        """The plan's words on the device, by one copy in the stream in use, in which the device's memory is."""
        words = plan.buffer.words
        if len(words) > len(self._words):
            self._grow(1 << len(words).bit_length())
        host = self._host[: len(words)]
        host.numpy()[:] = words
        if plan.table.shape[1] > 1:
            start, count, _, shape = plan.buffer.places["table"]
            _last_wins(host[start : start + count].numpy().reshape(shape))
        sent = self._words[: len(words)]
        self._streams.copy(sent, host)
        return sent

    def _grow(self, words: int) -> None:
        import torch

        self._host = self._streams.pinned(words, torch.int32)
        self._words = torch.empty(words, dtype=torch.int32, device=self._device)


def _last_wins(table: I32) -> None:
    """Of changes [3, U] to the same entry of the page table only the last may show: a GPU writes them in any order."""
    keys = (table[0].astype(np.int64) << 32) + table[1]
    _, last, which = np.unique(keys[::-1], return_index=True, return_inverse=True)
    if len(last) < len(keys):
        table[2] = table[2][::-1][last][which][::-1]


class Arrival:
    """Sampled ids, and words of log probabilities, on their way to the host."""

    def __init__(self, event: Event, ids: Tensor, words: Tensor, sources: tuple[Tensor, ...]) -> None:
        """`sources` are where they come from, held until `take`: freed memory would be written by the next step."""
        self.event = event
        self._ids, self._words, self._sources = ids, words, sources

    def take(self) -> tuple[Ids, I32]:
        """Copies of the ids and the words, once the event has fired."""
        self._sources = ()
        return self._ids.numpy().copy(), self._words.numpy().copy()


@dataclass(frozen=True)
class Step:
    """A step that was enqueued up to its late samples."""

    plan: Plan
    buffers: Buffers
    fields: Fields
    started: Event
    late: Arrival


class Clock:
    """Turns events into seconds of time.perf_counter(), each measured from the one before it."""

    def __init__(self, event: Event) -> None:
        """The event fires soon."""
        while not event.query():
            time.sleep(0)
        self._event, self._seconds = event, time.perf_counter()

    def seconds(self, event: Event) -> float:
        self._seconds += self._event.elapsed_time(event) / 1000
        self._event = event
        return self._seconds


class Pipeline:
    """Made and used on the device's thread only, but for `clock`, which is the loop's once `load` has returned."""

    def __init__(self, steps: TorchSteps, make_streams: Callable[[], Streams], depth: int) -> None:
        """`depth` is the number of launches that may be in flight."""
        self._steps, self._make_streams, self._depth = steps, make_streams, depth

    def load(self) -> DeviceInfo:
        streams = self._streams = self._make_streams()
        self._inputs, self._compute, self._results = streams.stream(), streams.stream(), streams.stream()
        with streams.use(self._compute):
            info = self._steps.load()
            self.clock = Clock(self._record(self._compute))
        with streams.use(self._inputs):
            self._buffers = [
                Buffers(streams, self._steps.device, self._steps.max_rows) for _ in range(self._depth)
            ]
        return info

    def reload(self, model_path: str) -> None:
        with self._streams.use(self._compute):
            self._steps.reload(model_path)

    def begin(self, plan: Plan, place: int) -> Step:
        """Enqueues a step up to its late samples, in the buffers number `place`."""
        from gapless.overlap.plan_tensors import DeviceFields

        streams, buffers = self._streams, self._buffers[place]
        with streams.use(self._inputs):
            words = buffers.send(plan)
            copied = self._record(self._inputs)
        self._compute.wait_event(copied)
        fields = DeviceFields(words, plan.buffer.places)
        with streams.use(self._compute):
            started = self._record(self._compute)
            self._steps.set_up(plan)
            late = self._steps.late_tokens(plan, fields)
            sampled = self._record(self._compute)
        arrival = self._bring(late, self._steps.take_found(), buffers.late_results, sampled)
        return Step(plan, buffers, fields, started, arrival)

    def finish(self, step: Step) -> tuple[Arrival, Event]:
        """Enqueues the rest of a step; returns its ids, and the event of its end."""
        with self._streams.use(self._compute):
            ids = self._steps.tokens(step.plan, step.fields)
            ended = self._record(self._compute)
        return self._bring(ids, self._steps.take_found(), step.buffers.results, ended), ended

    def _bring(self, ids: Tensor | None, words: Tensor | None, results: Results, sampled: Event) -> Arrival:
        """Copies both to the host once `sampled` has fired; where there is neither, that is all to wait for."""
        host_ids = results.ids[: 0 if ids is None else len(ids)]
        host_words = results.words(0 if words is None else len(words))
        moves = [
            (host, source) for host, source in ((host_ids, ids), (host_words, words)) if source is not None
        ]
        if not moves:
            return Arrival(sampled, host_ids, host_words, ())
        self._results.wait_event(sampled)
        with self._streams.use(self._results):
            for host, source in moves:
                self._streams.copy(host, source)
            event = self._record(self._results)
        return Arrival(event, host_ids, host_words, tuple(source for _, source in moves))

    def _record(self, stream: Stream) -> Event:
        event = self._streams.event()
        stream.record_event(event)
        return event
