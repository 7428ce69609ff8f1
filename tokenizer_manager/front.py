"""The HTTP process's view of the engine: whether it can serve, and the way in for requests."""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
import time
from collections.abc import Callable, Sequence
from typing import Any

from gapless.runtime.core.config import ServerConfig
from gapless.runtime.core.errors import GaplessError, InternalError, UnavailableError
from gapless.runtime.core.messages import (
    Abort,
    Fatal,
    Flush,
    Flushed,
    Heartbeat,
    Ready,
    ReleaseGroup,
    Submit,
    TextOutput,
    ToFront,
)
from gapless.runtime.tokenizer.base import Tokenizer
from gapless.tokenizer_manager.body import BodyRoom
from gapless.tokenizer_manager.flush import Flusher, FlushResult
from gapless.tokenizer_manager.grammar import Grammars
from gapless.tokenizer_manager.prepare import check_lengths, prepare
from gapless.tokenizer_manager.schema import Prompt
from gapless.tokenizer_manager.states import Call, Registry
from gapless.tokenizer_manager.templates import Templates

log = logging.getLogger("gapless.http")
STALE_SECONDS = 2.0
INLINE_SIZE = 8192  # characters or ids that are prepared on the event loop: a thread costs more than they do


class Front:
    """Fed by `handle` with what comes from the detokenizer; `send` goes to the scheduler and must not block."""

    def __init__(
        self,
        config: ServerConfig,
        send: Callable[[Submit | Abort | Flush | ReleaseGroup], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config = config
        self._send = send
        self.registry = Registry(send, config.max_queued_requests)
        self._flusher = Flusher(send, self.registry, self._check_alive)
        self.body_room = BodyRoom(config.max_body_bytes)
        self.grammars = Grammars(config.grammar_timeout, enabled=config.grammar_backend != "none")
        self.templates = Templates(config, lambda: self.tokenizer)
        self.tokenizer: Tokenizer | None = None
        self.ready: Ready | None = None
        self.draining = False
        self.updating = False  # the weights; no request is taken meanwhile
        self._ready_at = 0.0
        self._fatal: str | None = None
        self.heartbeat = Heartbeat(0.0, 0.0, 0, 0, 0, 0)  # the newest
        self._clock = clock
        self._seeds = random.Random(config.random_seed or None)

    def handle(self, message: ToFront) -> None:
        match message:
            case TextOutput():
                self.registry.apply(message)
            case Heartbeat():
                self.heartbeat = message
                self.registry.metrics.beat(self._clock())
            case Flushed():
                self._flusher.answered(message)
            case Ready():
                self.ready, self._ready_at = message, self._clock()
                self._announce()
            case Fatal():
                self._fatal = message.message
                self.fail_all(InternalError(f"the engine stopped: {message.message}"))

    def close(self) -> None:
        """Ends the processes that grammars are checked and templates rendered in."""
        self.grammars.close()
        self.templates.close()

    def fail_all(self, error: GaplessError) -> None:
        """Nothing more will come: ends all that is open with `error`."""
        self._flusher.fail_all(error)
        self.registry.fail_all(error)

    def set_tokenizer(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self._announce()

    def _announce(self) -> None:
        if self.refusal() is None and self.ready is not None:
            log.info("ready: the model was loaded in %.1f s", self.ready.load_seconds)

    def refusal(self) -> tuple[str, str] | None:
        """(status, reason) while no request can be taken."""
        if self._fatal is not None:
            return "dead", f"the engine stopped: {self._fatal}"
        if self.draining:
            return "draining", "the server is shutting down"
        if self.ready is None or self.tokenizer is None:
            return "loading", "the model is loading"
        if self.updating:
            return "updating", "the weights are being updated"
        return None

    def health(self) -> dict[str, Any]:
        """`status` is "ok" alone when the engine's loop turned within the last two seconds."""
        if (refusal := self.refusal()) is not None:
            return {"status": refusal[0], "reason": refusal[1]}
        silent = self._clock() - max(self.heartbeat.sent_at, self._ready_at)
        if silent >= STALE_SECONDS:
            return {"status": "stalled", "reason": f"no heartbeat of the engine for {silent:.1f} s"}
        return {"status": "ok"}

    def _check_alive(self) -> None:
        """For what may be waited for while the weights are updated."""
        if (health := self.health())["status"] not in ("ok", "updating"):
            raise UnavailableError(health["reason"])

    def check_open(self) -> None:
        if (refusal := self.refusal()) is not None:
            raise UnavailableError(refusal[1])

    def check_healthy(self) -> None:
        """For requests that can be sent elsewhere: they should not wait for an engine that hangs."""
        if (health := self.health())["status"] != "ok":
            raise UnavailableError(health["reason"])

    async def submit(self, call: Call, prompts: Sequence[Prompt]) -> None:
        """Tokenizes the call's prompts and hands their samples over.

        All, or none and RequestError for the prompt at fault.
        """
        tokenizer, ready = self.tokenizer, self.ready
        assert tokenizer is not None
        assert ready is not None
        check_lengths(prompts, tokenizer, ready)
        samples = iter([(state.uid, self._seeds.getrandbits(63)) for state in call.states])
        work = [(prompt, list(itertools.islice(samples, prompt.params.n))) for prompt in prompts]
        grammars = [await self.grammars.lark(prompt) for prompt in prompts]

        def run() -> list[Submit]:
            items = zip(work, grammars, strict=True)
            return [m for item, grammar in items for m in prepare(*item, tokenizer, ready, grammar)]

        size = sum(len(prompt.text or prompt.input_ids or "") for prompt in prompts)
        messages = run() if size <= INLINE_SIZE else await asyncio.to_thread(run)
        self.registry.submit(call, messages, tokenizer.pieces)

    def release_group(self, group: str) -> None:
        """What the group holds in the cache is for everybody again."""
        self.check_open()
        self._send(ReleaseGroup(group))

    async def flush_cache(self, timeout: float = 0.0) -> FlushResult:
        """Empties the prefix cache, or says what keeps it in use when `timeout` seconds are over."""
        return await self._flusher.flush(timeout)

    async def update_weights(self, model_path: str, timeout: float) -> FlushResult:
        """Takes no new requests, waits for the open ones for up to `timeout` seconds, and has other weights loaded.

        Raises RequestError where they cannot be taken; the old ones go on then.
        """
        self.check_open()
        self.updating = True
        try:
            return await self._flusher.flush(timeout, model_path)
        finally:
            self.updating = False
