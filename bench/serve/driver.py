"""Sends a dataset to a server as its arrivals say, and keeps a Record of each request.

One event loop, one task a request. Bytes are stamped where the socket hands them over, before anything is parsed; how
busy this process was stands in the Outcome, so that a report can say where the client was the bottleneck.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import time
from collections.abc import AsyncIterator, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from gapless.bench.serve.dialects import Asking, Reader, StreamError, Whole, is_ids, is_messages
from gapless.bench.serve.record import Item, Record
from gapless.bench.serve.server import LoadSampler, refusal
from gapless.runtime.core.http_client import HttpClient
from gapless.runtime.core.sse import EventParser
from gapless.runtime.tokenizer.base import Tokenizer

PULSE_SECONDS = 0.02
TICKS = 25  # pulses between two looks at the progress


class Progress(Protocol):
    def started(self) -> None: ...
    def chunk(self, tokens: int) -> None: ...
    def finished(self, record: Record) -> None: ...
    def tick(self, now: float) -> None: ...


@dataclass(frozen=True, slots=True)
class Load:
    """`due` has the time of each item, in seconds; of those with `after` it is not read."""

    items: Sequence[Item]
    due: NDArray[np.float64]
    max_concurrency: int | None = None
    duration: float | None = None  # seconds after which nothing is sent and what still runs is cut
    timeout: float | None = None  # seconds for one request


@dataclass(slots=True)
class Outcome:
    """`records` in the order of sending; `duration` in seconds, from the start to the end of the last request."""

    records: list[Record]
    exchanges: list[tuple[list[int], list[int]]]  # the records' prompts and answers in ids, as near as can be
    chat: bool  # some prompts went through a chat template
    duration: float
    unsent: int  # items whose turn did not come: the time was up, or the item before them did not complete
    samples: list[dict[str, float]] = field(default_factory=list)  # of the server's load
    client_cpu: float = 0.0  # cores that this process used
    loop_lag_p99_ms: float = 0.0  # by which this process was late for its own timers


class Driver:
    """For one run on the running loop. `tokenizer` turns ids into text for chat, and counts what came back."""

    def __init__(
        self, client: HttpClient, asking: Asking, load: Load, tokenizer: Tokenizer, progress: Progress
    ) -> None:
        self._client, self._asking, self._load = client, asking, load
        self._tokenizer, self._progress = tokenizer, progress
        self._followers: dict[int, list[int]] = {}
        for index, item in enumerate(load.items):
            if item.after is not None:
                self._followers.setdefault(item.after, []).append(index)
        self._slots = asyncio.Semaphore(load.max_concurrency or len(load.items) + 1)
        self._answers: list[tuple[Record, Reader, Whole]] = []
        self._lags: list[float] = []

    async def run(self) -> Outcome:
        with _collector_off():
            self._started, cpu = time.perf_counter(), time.process_time()
            sampler = LoadSampler(self._client, self._asking.backend, self._started)
            async with _in_background(self._pulse()), _in_background(sampler.run()):
                await self._send_all()
            ended, cpu = self._now(), time.process_time() - cpu
        records = self._counted()
        return Outcome(
            records=records,
            exchanges=[self._exchange(record, whole) for record, _, whole in self._answers],
            chat=any(self._asking.uses_chat(whole) for _, _, whole in self._answers),
            duration=max([record.ended for record in records], default=ended),
            unsent=len(self._load.items) - len(records),
            samples=sampler.samples,
            client_cpu=cpu / ended,
            loop_lag_p99_ms=1000 * float(np.percentile(self._lags, 99)) if self._lags else 0.0,
        )

    def _now(self) -> float:
        return time.perf_counter() - self._started

    async def _send_all(self) -> None:
        """Until all have ended, or the time is up."""
        items, due = self._load.items, self._load.due
        first = [index for index, item in enumerate(items) if item.after is None]
        first.sort(key=lambda index: due[index])
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._load.duration), asyncio.TaskGroup() as self._group:
                for index in first:
                    await self._until(float(due[index]))
                    self._group.create_task(self._one(index, float(due[index]), items[index].prompt))

    async def _until(self, due: float) -> None:
        while (left := due - self._now()) > 0:
            await asyncio.sleep(left)

    async def _one(self, index: int, due: float, whole: Whole, before: int = 0) -> None:
        """Sends one item; `whole` is all of its prompt, `before` how many tokens come before its own."""
        item = self._load.items[index]
        if self._asking.uses_chat(whole) and is_ids(whole):
            whole = self._decode(whole)
        body = self._asking.body(whole, item.output_len)
        waits = self._slots.locked()
        async with self._slots:
            now = self._now()
            record = Record(index, before + item.prompt_len, item.output_len, now if waits else due, now)
            reader = self._asking.reader(whole, record)
            self._answers.append((record, reader, whole))
            self._progress.started()
            try:
                await self._ask(whole, body, record, reader)
            except (OSError, TimeoutError, StreamError) as error:
                record.error = str(error) or type(error).__name__
            except asyncio.CancelledError:
                record.cut = True
                raise
            finally:
                record.ended = self._now()
                self._progress.finished(record)
        if not record.error:
            self._follow(index, record, whole)

    async def _ask(self, whole: Whole, body: bytes, record: Record, reader: Reader) -> None:
        parser, started = EventParser(), self._started

        def take(data: bytes, at: float) -> None:
            try:
                payloads = parser.feed(data)
            except ValueError as error:
                raise StreamError(str(error)) from error
            for payload in payloads:
                if tokens := reader.event(payload, at - started):
                    self._progress.chunk(tokens)

        def sent(at: float) -> None:
            record.sent = at - started

        response = await self._client.stream(
            "POST", self._asking.path(whole), body, on_data=take, on_sent=sent, timeout=self._load.timeout
        )
        if response.status >= 300:
            raise StreamError(refusal(response))
        try:
            reader.end()
        except StreamError as error:
            kind = [response.headers.get(f"content-{name}", "") for name in ("encoding", "type")]
            if not record.chunks and not (kind[0] == "" and "event-stream" in kind[1]):
                raise StreamError(
                    f"{error}: it came as {' '.join(filter(None, kind)) or 'no type'}"
                ) from error
            raise

    def _follow(self, index: int, record: Record, whole: Whole) -> None:
        """Starts the items that come after this one."""
        for follower in self._followers.get(index, ()):
            item = self._load.items[follower]
            tokens = record.prompt_len + (record.completion_tokens or record.output_len)
            due = self._now() + item.delay
            self._group.create_task(
                self._later(follower, due, self._joined(whole, record, item.prompt), tokens)
            )

    async def _later(self, index: int, due: float, whole: Whole, before: int) -> None:
        await self._until(due)
        await self._one(index, due, whole, before)

    def _joined(self, whole: Whole, record: Record, prompt: Whole) -> Whole:
        """A prompt, its answer, and what is said next."""
        if isinstance(whole, str):
            assert not is_messages(prompt), "the items of a dataset are of one kind"
            return whole + record.text + (self._decode(prompt) if is_ids(prompt) else str(prompt))
        if is_messages(whole):
            assert is_messages(prompt), "the items of a dataset are of one kind"
            return [*whole, {"role": "assistant", "content": record.text}, *prompt]
        assert is_ids(whole) and is_ids(prompt), "the items of a dataset are of one kind"
        return [*whole, *(record.output_ids or self._encode(record.text)), *prompt]

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False)

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)

    def _counted(self) -> list[Record]:
        """The records, with what is counted after the run."""
        records = [record for record, _, _ in self._answers]
        for _, reader, _ in self._answers:
            reader.settle(self._count)
        for record, tokens in zip(records, self._count([record.text for record in records]), strict=True):
            record.retokenized = tokens
        return records

    def _exchange(self, record: Record, whole: Whole) -> tuple[list[int], list[int]]:
        if is_messages(whole):
            whole = "\n".join(str(message.get("content")) for message in whole)
        prompt = whole if is_ids(whole) else self._tokenizer.encode(str(whole))
        return prompt, record.output_ids or self._encode(record.text)

    def _count(self, texts: Sequence[str]) -> list[int]:
        """Tokens of each text."""
        return [len(ids) for ids in self._tokenizer.encode_batch(texts, add_special_tokens=False)]

    async def _pulse(self) -> None:
        """Measures by how much the loop is late, and lets the progress be shown."""
        loop = asyncio.get_running_loop()
        for count in range(1 << 62):
            due = loop.time() + PULSE_SECONDS
            await asyncio.sleep(PULSE_SECONDS)
            self._lags.append(max(0.0, loop.time() - due))
            if count % TICKS == 0:
                self._progress.tick(time.perf_counter())


@contextlib.asynccontextmanager
async def _in_background(work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    task = asyncio.create_task(work)
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


@contextlib.contextmanager
def _collector_off() -> Iterator[None]:
    """A collection of many live records takes long enough to show in the figures; what a run makes has no cycles."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
