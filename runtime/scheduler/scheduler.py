"""The scheduler without its sockets: messages in, plans out, retired steps in, one columnar message a step out."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from gapless.overlap.device import Ids
from gapless.radix_cache.cache import PrefixCache
from gapless.runtime.core.config import ServerConfig
from gapless.runtime.core.errors import GaplessError, InternalError, RequestError
from gapless.runtime.core.logprobs import LogprobRow, Logprobs
from gapless.runtime.core.messages import (
    Abort,
    Closed,
    Finish,
    Flush,
    Flushed,
    Opened,
    ReleaseGroup,
    StepOutput,
    Stop,
    Submit,
    ToScheduler,
    int32s,
)
from gapless.runtime.core.plan import I32, DeviceInfo, Plan, Slots
from gapless.runtime.scheduler.admission import Admission
from gapless.runtime.scheduler.batch import Batch
from gapless.runtime.scheduler.compose import Composer
from gapless.runtime.scheduler.composition import Composition
from gapless.runtime.scheduler.grammar import GrammarComplete, MakeGrammar, unconstrained
from gapless.runtime.scheduler.planner import Planner
from gapless.runtime.scheduler.request import Request
from gapless.runtime.scheduler.reserve import Reserve
from gapless.runtime.scheduler.rows import (
    CONSTRAINED,
    ENDING,
    GENERATION,
    KNOWN_LEN,
    MAX_OUTPUT,
    OUTPUT_LEN,
    PREEMPTED,
)
from gapless.runtime.scheduler.swap import SwapSpace

log = logging.getLogger("gapless.scheduler")
_LENGTH, _STOP_TOKEN = int(Finish.LENGTH), int(Finish.STOP_TOKEN)
NO_COLUMNS: I32 = np.empty((4, 0), np.int32)


class Scheduler:
    """Call `handle` for each message, `compose` and launch the plans it gives, `retire` each in order (and `take_late`
    as early as its late samples are there), and send what `take_output` gives."""

    def __init__(
        self, config: ServerConfig, info: DeviceInfo, make_grammar: MakeGrammar = unconstrained
    ) -> None:
        cache = PrefixCache(
            info.pages,
            config.page_size,
            enabled=not config.disable_radix_cache,
            eviction=config.radix_eviction_policy,
        )
        swap = SwapSpace(config.preemption, info.host_pages, info.costs)
        self.batch = Batch(config.max_running_requests, info.context_length, cache, swap)
        reserve = Reserve()
        self.admission = Admission(config, self.batch, reserve)
        self.composer = Composer(config, self.batch, self.admission, reserve)
        self._planner = Planner(self.batch)
        self.context_length, self.vocab_size = info.context_length, info.vocab_size
        self.pool_tokens = info.pages * config.page_size
        self.on_composed: Callable[[], None] = lambda: (
            None
        )  # between composing and planning, for measurements
        self._make_grammar = make_grammar
        self._by_uid: dict[int, Request] = {}
        self._arrivals = 0
        self._late_step = 0  # the last step whose late samples were taken in
        self._closed: list[Closed] = []
        self._flushed: list[Flushed] = []
        self.reloads: list[Flush] = []  # ask for other weights; the first is to be answered by `reloaded`
        self._columns: list[tuple[I32, I32, I32, I32]] = []  # slots, generations, ids, finish
        self._logprobs: list[tuple[int, int, bool, Logprobs]] = []

    @property
    def max_prompt_tokens(self) -> int:
        """The longest prompt that leaves room for one token of output."""
        return min(self.context_length - 1, self.pool_tokens)

    @property
    def counts(self) -> tuple[int, int, int]:
        """Requests running, requests waiting (preempted ones too), tokens of the pool in use."""
        waiting = len(self.admission.waiting) + len(self.admission.preemption.preempted)
        used = self.batch.cache.used_pages * self.batch.cache.page_size
        return len(self._by_uid) - waiting, waiting, used

    @property
    def is_idle(self) -> bool:
        return self.batch.is_idle() and not self.admission.waiting

    def audit(self) -> str:
        """What is wrong with the accounting of an idle scheduler, from its counts; empty where nothing is."""
        cache, swap, rows = self.batch.cache, self.batch.swap, self.batch.rows
        used = cache.used_pages - self.batch.groups.pages
        if not (used or swap.used_pages or self._by_uid or rows.in_flight.any()):
            return ""
        return (
            f"{used} of {cache.total_pages} pages, {swap.used_pages} host pages, "
            f"{len(self._by_uid)} requests and {int(rows.in_flight.sum())} launches are held at rest"
        )

    def handle(self, messages: Iterable[ToScheduler]) -> None:
        """Call it at each turn of the loop, with or without messages."""
        self.batch.groups.expire()
        for message in messages:
            match message:
                case Submit():
                    self._submit(message)
                case Abort():
                    self._abort(message.uid)
                case Stop():
                    self._stop(message)
                case Flush():
                    self._flush(message)
                case ReleaseGroup():
                    self.batch.groups.release(message.group)

    def compose(self) -> Plan | None:
        """The next step, or None when there is nothing to launch."""
        return self._build(self.composer.compose())

    def compose_more(self) -> Plan | None:
        """A further step of the same composition, for multi-step scheduling."""
        return self._build(self.composer.compose_more())

    def take_late(self, plan: Plan, ids: Ids, logprobs: Sequence[Logprobs] = ()) -> None:
        """Takes in what a step sampled late, once; before the step itself has retired, if possible."""
        if plan.step <= self._late_step:
            return
        self._late_step = plan.step
        self._keep_logprobs(plan.late_logprobs, logprobs)
        if len(ids):
            self._decide(plan.late.slots.astype(np.intp), plan.late_generations, ids)

    def retire(
        self,
        plan: Plan,
        ids: Ids,
        late_ids: Ids,
        logprobs: Sequence[Logprobs] = (),
        late_logprobs: Sequence[Logprobs] = (),
    ) -> None:
        """Takes in what a step that the device has finished gave; steps retire in launch order."""
        rows, batch, slots, late = self.batch.rows, self.batch, plan.index, plan.late.slots
        self.take_late(plan, late_ids, late_logprobs)
        if plan.logprobs:
            self._keep_logprobs(plan.logprobs, logprobs)
        rows.in_flight[slots] -= 1
        rows.computed_len[slots] = plan.kv_len
        sampled, generations = slots, plan.generations
        if len(plan.sample_rows) < len(slots):
            sampled, generations = slots[plan.sample_rows], generations[plan.sample_rows]
        may_leave = self._decide(sampled, generations, ids)
        batch.retired(plan.step)
        if plan.chunks:
            for slot in slots[len(slots) - plan.chunks :].tolist():
                if not rows.has(slot, ENDING):
                    batch.publish(slot)
                    self.admission.computed(slot)
                    self._end_without_output(slot)
        if late.size:
            rows.in_flight[late] -= 1
            slots = np.concatenate([slots, late])
        if may_leave or plan.chunks or late.size or plan.held_rows.size:
            for slot in slots[rows.flags[slots] & (ENDING | PREEMPTED) > 0].tolist():
                batch.settle(slot)

    def take_output(self) -> StepOutput | None:
        """What the detokenizer must hear since the last call."""
        started, self.admission.started = self.admission.started, []
        parts, self._columns = self._columns, []
        logprobs, self._logprobs = self._logprobs, []
        if not parts and not started and not self._closed and not logprobs:
            return None
        if len(parts) == 1:
            slots, generations, ids, finish = parts[0]
        else:
            slots, generations, ids, finish = np.concatenate([NO_COLUMNS, *parts], axis=1)
        output = StepOutput(
            opened=[self._opened(request) for request in started],
            slots=slots.tobytes(),
            generations=generations.tobytes(),
            ids=ids.tobytes(),
            finish=finish.astype(np.uint8).tobytes(),
            closed=self._closed,
            logprobs=logprobs,
        )
        self._closed = []
        return output

    def take_flushed(self) -> list[Flushed]:
        """Answers to Flush messages since the last call."""
        flushed, self._flushed = self._flushed, []
        return flushed

    def check_idle(self) -> None:
        """Raises AssertionError unless all is given back but what groups hold, which it takes back; for when nothing is
        alive."""
        assert not self._by_uid and not self.admission.waiting and not self.admission.preemption.preempted
        groups, used = self.batch.groups, self.batch.cache.used_pages
        assert used == groups.pages, f"{used} pages are in use, {groups.pages} are held"
        groups.clear()
        self.batch.check_idle()

    def _submit(self, message: Submit) -> None:
        prompt, odd = divmod(len(message.input_ids), 4)
        if message.uid in self._by_uid or odd:
            log.error("dropped a request with uid %d: a second one, or not of whole ids", message.uid)
            return
        try:
            if not 1 <= prompt <= self.max_prompt_tokens:
                limit = self.max_prompt_tokens
                raise RequestError(f"a prompt has 1 to {limit} tokens here, this one has {prompt}")
            ids = int32s(message.input_ids)
            if ids.min() < 0 or ids.max() >= self.vocab_size:
                raise RequestError(f"a token id lies outside 0 to {self.vocab_size - 1}")
            grammar = self._make_grammar(message)
        except Exception as error:  # its own fault ends its own request
            code = error.code if isinstance(error, GaplessError) else InternalError.code
            self._closed.append(Closed(message.uid, Finish.FAILED, str(error), code, prompt))
            return
        room = min(self.context_length - prompt, self.pool_tokens - prompt + 1)
        self._arrivals += 1
        max_output = min(message.params.max_new_tokens, room)
        leader = self._by_uid.get(message.leader)
        group = self.batch.groups.join(message.group)
        request = Request(message, self._arrivals, max_output, grammar, leader, group)
        self._by_uid[message.uid] = request
        self.admission.add(request)

    def _abort(self, uid: int) -> None:
        """Ends a request, wherever it is; one that has ended already, or never was, is not an error."""
        request = self._by_uid.get(uid)
        if request is not None:
            self._close(request, Finish.ABORT)

    def _stop(self, message: Stop) -> None:
        rows, slot = self.batch.rows, message.slot
        if not 0 < slot < len(rows.generation):
            log.error("dropped a stop for slot %d, which is not there", slot)
            return
        if rows.generation[slot] != message.generation or not self.batch.is_live(slot):
            return
        rows.truncate(slot, message.output_len)
        self._end(slot)

    def _flush(self, message: Flush) -> None:
        running, waiting, _ = self.counts
        done = not self._by_uid
        if done and message.model_path:
            self.reloads.append(message)
            return
        pages = self._forget_prefixes() if done else 0
        self._flushed.append(Flushed(message.number, done, pages, running, waiting))

    def reloaded(self, error: BaseException | None) -> None:
        """The device has the weights that were asked for first; or, after an error, still the old ones."""
        message = self.reloads.pop(0)
        pages = 0 if error else self._forget_prefixes()
        self._flushed.append(Flushed(message.number, error is None, pages, 0, 0, str(error or "")))

    def _forget_prefixes(self) -> int:
        """At rest; how many pages that frees."""
        self.batch.groups.clear()
        return self.batch.cache.flush()

    def _close(self, request: Request, finish: Finish, message: str = "") -> None:
        """Ends a request without a new id."""
        uid, code = request.submit.uid, InternalError.code if finish == Finish.FAILED else ""
        self._closed.append(Closed(uid, finish, message, code, len(request.prompt)))
        if request.slot:
            self._end(request.slot)
        else:
            self.admission.withdraw(request)
            del self._by_uid[uid]
            self.batch.groups.leave(request.group)

    def _end(self, slot: int) -> None:
        """Marks the row: it is launched no more, and gives all back when nothing of it is in flight."""
        request = self.batch.request(slot)
        self.batch.rows.flags[slot] |= ENDING
        del self._by_uid[request.submit.uid]
        self.admission.ended(request)
        self.batch.settle(slot)

    def _end_without_output(self, slot: int) -> None:
        """A request for no tokens is done when its prompt is computed."""
        rows = self.batch.rows
        if rows.max_output[slot] == 0 and rows.computed_len[slot] >= rows.prompt_len[slot]:
            self._close(self.batch.request(slot), Finish.LENGTH)

    def _build(self, what: Composition) -> Plan | None:
        self.on_composed()
        failed, self.composer.failed = self.composer.failed, []
        for request, error in failed:
            if isinstance(error, GrammarComplete):
                self._close(request, Finish.STOP_TOKEN)
            else:
                self._fail(request, error)
        return None if what.is_empty else self._planner.build(what)

    def _decide(self, slots: Slots, generations: I32, ids: Ids) -> bool:
        """Appends sampled ids to their rows and ends those that stop; False if no row here is on its way out."""
        if not slots.size:
            return False
        rows = self.batch.rows
        state, flags = rows.state.take(slots, axis=1), rows.flags[slots]
        seen = int(np.bitwise_or.reduce(flags))
        dead = state[GENERATION] != generations
        if seen & ENDING or np.count_nonzero(dead):
            live = ~dead & (flags & ENDING == 0)
            slots, generations, ids = slots[live], generations[live], ids[live]
            state, flags = state[:, live], flags[live]
        new = ids.astype(np.int32)
        rows.append(slots, state[KNOWN_LEN], new)
        finish = np.zeros(len(slots), np.int32)
        full, stopped = state[OUTPUT_LEN] >= state[MAX_OUTPUT] - 1, rows.stop_ids[slots] == new[:, None]
        ended = np.count_nonzero(full) + np.count_nonzero(stopped)
        if ended:
            finish[full] = _LENGTH
            finish[stopped.any(axis=1)] = _STOP_TOKEN
        self._columns.append((slots.astype(np.int32), generations, new, finish))
        if seen & CONSTRAINED:
            self._accept(slots[(finish == 0) & (flags & CONSTRAINED > 0)])
        if ended:
            for slot in slots[finish > 0].tolist():
                self._end(slot)
        return bool(ended or seen & (ENDING | PREEMPTED | CONSTRAINED))

    def _keep_logprobs(self, asked: Sequence[LogprobRow], found: Sequence[Logprobs]) -> None:
        """For the rows that `_decide` is going to heed."""
        rows = self.batch.rows
        for row, logprobs in zip(asked, found, strict=True):
            if rows.generation[row.slot] == row.generation and not rows.has(row.slot, ENDING):
                self._logprobs.append((row.slot, row.generation, row.ids is not None, logprobs))

    def _accept(self, slots: Slots) -> None:
        """Tells grammars of their newest token."""
        for slot in slots.tolist():
            request = self.batch.request(slot)
            assert request.grammar is not None
            try:
                request.grammar.accept(int(self.batch.rows.known(slot)[-1]))
            except Exception as error:  # its own fault ends its own request
                self._fail(request, error)

    def _fail(self, request: Request, error: Exception) -> None:
        log.warning("request %d failed: %r", request.submit.uid, error)
        self._close(request, Finish.FAILED, f"the grammar failed: {error}")

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
            min_new_tokens=params.min_new_tokens,
        )
