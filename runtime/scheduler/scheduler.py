"""The scheduler without its sockets: messages in, plans out, retired steps in, one columnar message a step out."""

from __future__ import annotations

import logging
from collections.abc import Iterable

import numpy as np

from gapless.radix_cache.cache import PrefixCache
from gapless.runtime.core.config import ServerConfig
from gapless.runtime.core.errors import CapacityError, RequestError
from gapless.runtime.core.messages import (
    Abort,
    Closed,
    Finish,
    Opened,
    StepOutput,
    Stop,
    Submit,
    ToScheduler,
    column,
)
from gapless.runtime.core.plan import I32, DeviceInfo, Plan
from gapless.runtime.scheduler.batch import Batch
from gapless.runtime.scheduler.compose import Composer
from gapless.runtime.scheduler.plan_builder import build_plan
from gapless.runtime.scheduler.request import Request

log = logging.getLogger("gapless.scheduler")


class Scheduler:
    """Call `handle` for each message, `compose` and launch what it gives, `retire` each launch in order, and send
    `take_output` whenever it is not None."""

    def __init__(self, config: ServerConfig, info: DeviceInfo) -> None:
        cache = PrefixCache(info.pages, config.page_size, enabled=not config.disable_radix_cache)
        self.batch = Batch(config.max_running_requests, info.context_length, cache)
        self.composer = Composer(config, self.batch)
        self.context_length = info.context_length
        self.pool_tokens = info.pages * config.page_size
        self._by_uid: dict[int, Request] = {}
        self._arrivals = 0
        self._closed: list[Closed] = []
        self._columns: tuple[I32, I32, I32, I32] | None = None  # slots, generations, ids, finish

    @property
    def max_prompt_tokens(self) -> int:
        """The longest prompt that leaves room for one token of output."""
        return min(self.context_length - 1, self.pool_tokens)

    @property
    def counts(self) -> tuple[int, int, int]:
        """Requests running, requests waiting (preempted ones too), tokens of the pool in use."""
        waiting = len(self.composer.waiting) + len(self.composer.preempted)
        used = self.batch.cache.used_pages * self.batch.cache.page_size
        return len(self._by_uid) - waiting, waiting, used

    @property
    def is_idle(self) -> bool:
        return self.batch.is_idle() and not self.composer.waiting

    def handle(self, messages: Iterable[ToScheduler]) -> None:
        for message in messages:
            match message:
                case Submit():
                    self._submit(message)
                case Abort():
                    self._abort(message.uid)
                case Stop():
                    self._stop(message)

    def compose(self) -> Plan | None:
        """The next step, or None when there is nothing to launch."""
        decode, chunks = self.composer.compose()
        if not decode.size and not chunks:
            return None
        return build_plan(self.batch, decode, chunks)

    def retire(self, plan: Plan, ids: np.ndarray) -> None:
        """Takes in the sampled `ids` of a step that the device has finished; steps retire in launch order."""
        rows, batch = self.batch.rows, self.batch
        live = rows.generation[plan.slots] == plan.generations
        slots = plan.slots[live]
        rows.in_flight[slots] -= 1
        rows.computed_len[slots] = plan.kv_len[live]
        self._decide(plan, live, ids)
        batch.retired(plan.step)
        prefilled = slots[(rows.computed_len[slots] <= rows.target_len[slots]) & ~rows.ending[slots]]
        for slot in prefilled.tolist():
            batch.publish(slot)
            self._end_without_output(slot)
        leaving = rows.ending[slots] | rows.preempted[slots]
        for slot in slots[leaving].tolist():
            batch.settle(slot)

    def take_output(self) -> StepOutput | None:
        """What the detokenizer must hear since the last call."""
        started, self.composer.started = self.composer.started, []
        if self._columns is None and not started and not self._closed:
            return None
        empty = np.empty(0, np.int32)
        slots, generations, ids, finish = self._columns or (empty, empty, empty, empty)
        output = StepOutput(
            opened=[self._opened(request) for request in started],
            slots=column(slots, "<i4"),
            generations=column(generations, "<i4"),
            ids=column(ids, "<i4"),
            finish=column(finish, "u1"),
            closed=self._closed,
        )
        self._columns, self._closed = None, []
        return output

    def check_idle(self) -> None:
        """Raises AssertionError unless all is given back; for when nothing is alive."""
        assert not self._by_uid and not self.composer.waiting and not self.composer.preempted
        self.batch.check_idle()

    def _submit(self, message: Submit) -> None:
        prompt = len(message.input_ids) // 4
        if message.uid in self._by_uid:
            log.error("dropped a second request with uid %d", message.uid)
            return
        if not 1 <= prompt <= self.max_prompt_tokens:
            error: RequestError | CapacityError = RequestError(
                f"a prompt has 1 to {self.max_prompt_tokens} tokens here, this one has {prompt}"
            )
            self._closed.append(Closed(message.uid, Finish.FAILED, error.message, error.code, prompt))
            return
        room = min(self.context_length - prompt, self.pool_tokens - prompt + 1)
        self._arrivals += 1
        request = Request(message, self._arrivals, min(message.params.max_new_tokens, room))
        self._by_uid[message.uid] = request
        self.composer.waiting[message.uid] = request

    def _abort(self, uid: int) -> None:
        """Ends a request, wherever it is; one that has ended already, or never was, is not an error."""
        request = self._by_uid.get(uid)
        if request is not None:
            self._close(request, Finish.ABORT)

    def _stop(self, message: Stop) -> None:
        rows, slot = self.batch.rows, message.slot
        if rows.generation[slot] != message.generation or rows.ending[slot]:
            return
        rows.output_len[slot] = min(int(rows.output_len[slot]), message.output_len)
        self._end(slot)

    def _close(self, request: Request, finish: Finish) -> None:
        """Ends a request without a new id."""
        uid = request.submit.uid
        self._closed.append(Closed(uid, finish, prompt_tokens=len(request.prompt)))
        if request.slot:
            self._end(request.slot)
        else:
            del self.composer.waiting[uid]
            del self._by_uid[uid]

    def _end(self, slot: int) -> None:
        """Marks the row: it is launched no more, and gives all back when nothing of it is in flight."""
        request = self.batch.request(slot)
        self.batch.rows.ending[slot] = True
        del self._by_uid[request.submit.uid]
        if request in self.composer.preempted:
            self.composer.preempted.remove(request)
        self.batch.settle(slot)

    def _end_without_output(self, slot: int) -> None:
        """A request for no tokens is done when its prompt is computed."""
        rows = self.batch.rows
        if rows.max_output[slot] == 0 and rows.computed_len[slot] >= rows.prompt_len[slot]:
            self._close(self.batch.request(slot), Finish.LENGTH)

    def _decide(self, plan: Plan, live: np.ndarray, ids: np.ndarray) -> None:
        """Appends the sampled ids to their rows and finds those that end with them."""
        rows = self.batch.rows
        wanted = live[plan.sample_rows] & ~rows.ending[plan.slots[plan.sample_rows]]
        slots = plan.slots[plan.sample_rows[wanted]]
        if not slots.size:
            return
        new = ids[wanted].astype(np.int32)
        rows.tokens[slots, rows.prompt_len[slots] + rows.output_len[slots]] = new
        rows.output_len[slots] += 1
        stopped = (rows.stop_ids[slots] == new[:, None]).any(axis=1)
        full = rows.output_len[slots] >= rows.max_output[slots]
        finish = np.where(stopped, Finish.STOP_TOKEN, np.where(full, Finish.LENGTH, Finish.NONE))
        assert self._columns is None, "a step's output was not taken"
        self._columns = (slots, rows.generation[slots], new, finish)
        for slot in slots[finish > 0].tolist():
            self._end(slot)

    def _opened(self, request: Request) -> Opened:
        params = request.submit.params
        return Opened(
            uid=request.submit.uid,
            slot=request.slot,
            generation=request.generation,
            prompt_tokens=len(request.prompt),
            cached_tokens=request.cached_tokens,
            stop=params.stop,
            skip_special_tokens=params.skip_special_tokens,
            no_stop_trim=params.no_stop_trim,
        )
