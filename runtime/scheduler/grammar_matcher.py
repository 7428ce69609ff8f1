"""Grammars by llguidance, worked on by threads of their own while the scheduler's loop goes on.

A grammar is compiled while its request waits and its prompt is computed; the mask for a token is computed while the
forward of the token before runs. llguidance lets go of the GIL for both. A row whose mask is late sits out.
"""

from __future__ import annotations

import os
import threading
import time
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
from llguidance import LLMatcher, LLTokenizer

from gapless.runtime.core.errors import InternalError, RequestError
from gapless.runtime.core.messages import Submit
from gapless.runtime.core.plan import I32
from gapless.runtime.scheduler.grammar import Grammar, GrammarComplete
from gapless.runtime.tokenizer.grammar_vocabulary import grammar_tokenizer
from gapless.runtime.tokenizer.load import load_pieces

MAX_COMPILED = 256  # grammars kept, with no request's state in them
MAX_COMPILED_CHARS = 8 << 20  # of their text; compiled, a large one takes some 50 bytes for each
LATE_S = 30.0  # a mask or a compilation that takes longer ends its request
_Compiled = tuple[LLMatcher, I32]  # at its start, and the mask there


def load_in_background(model_path: str) -> Future[LLTokenizer]:
    """The model's vocabulary, made in a thread; it can be made while the device loads the model."""
    future: Future[LLTokenizer] = Future()

    def load() -> None:
        try:
            future.set_result(grammar_tokenizer(load_pieces(model_path)))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=load, name="gapless-vocabulary", daemon=True).start()
    return future


class Grammars:
    """Makes the grammar of each request. `vocab_size` is the model's rows; masks cover them all."""

    def __init__(self, tokenizer: LLTokenizer, vocab_size: int) -> None:
        self._tokenizer, self.vocab_size = tokenizer, vocab_size
        self.end = tokenizer.eos_token  # one more than the tokenizer's last id
        self.allowed = bits(range(min(self.end, vocab_size)), vocab_size)  # all ids with a meaning
        self._compilers = ThreadPoolExecutor(1, thread_name_prefix="gapless-compile")
        self.workers = ThreadPoolExecutor(min(os.cpu_count() or 1, 8), thread_name_prefix="gapless-mask")
        self._compiled: OrderedDict[str, _Compiled] = OrderedDict()
        self._chars = 0  # of the keys of _compiled
        self._lock = threading.Lock()  # over both

    def make(self, submit: Submit) -> Grammar | None:
        """Returns at once: what it gives is compiled in the background."""
        if not submit.grammar:
            return None
        known = self._find(submit.grammar) is not None
        job = (self.workers if known else self._compilers).submit(self._start, submit.grammar)
        stops = tuple(token for token in submit.stop_ids if 0 <= token < self.vocab_size)
        return LLGrammar(self, job, bits(stops, self.vocab_size))

    def _start(self, lark: str) -> _Compiled:
        """A matcher of its own for one request, and its first mask."""
        compiled = self._find(lark)
        if compiled is None:
            matcher = LLMatcher(self._tokenizer, lark, log_level=0)
            compiled = matcher, mask_of(matcher)
            with self._lock:
                self._chars += len(lark) * (lark not in self._compiled)
                self._compiled[lark] = compiled
                while len(self._compiled) > MAX_COMPILED or self._chars > MAX_COMPILED_CHARS:
                    self._chars -= len(self._compiled.popitem(last=False)[0])
        matcher, mask = compiled
        return matcher.deep_copy(), mask

    def _find(self, lark: str) -> _Compiled | None:
        with self._lock:
            compiled = self._compiled.get(lark)
            if compiled is not None:
                self._compiled.move_to_end(lark)
            return compiled


class LLGrammar:
    """One request's state. `stops` has the bits of the ids that end the request, allowed wherever the output may end.

    An output that cannot go on has ended: no id need say so, and `ignore_eos` or `min_new_tokens` cannot prevent it.
    """

    def __init__(self, grammars: Grammars, start: Future[_Compiled], stops: I32) -> None:
        self._grammars, self._stops = grammars, stops
        self._job = start
        self._since = time.monotonic()

    def mask(self, wait_s: float) -> I32 | None:
        try:
            _, mask = self._job.result(wait_s)
        except TimeoutError:
            if (waited := time.monotonic() - self._since) < LATE_S:
                return None
            raise InternalError(f"it has computed for {waited:.0f} s") from None
        grammars, end = self._grammars, self._grammars.end
        may_end = bool(mask[end // 32] >> (end % 32) & 1)
        allowed = np.zeros_like(grammars.allowed)
        shared = min(len(mask), len(allowed))
        np.bitwise_and(mask[:shared], grammars.allowed[:shared], out=allowed[:shared])
        if not allowed.any():
            raise GrammarComplete if may_end else RequestError("no token of the vocabulary fits it here")
        return allowed | self._stops if may_end else allowed

    def accept(self, token: int) -> None:
        matcher, _ = self._job.result(0)
        self._since = time.monotonic()
        self._job = self._grammars.workers.submit(_advance, matcher, token)


def _advance(matcher: LLMatcher, token: int) -> _Compiled:
    if not matcher.consume_token(token):
        raise RequestError(_reason(matcher))
    return matcher, mask_of(matcher)


def mask_of(matcher: LLMatcher) -> I32:
    """[words]: the ids that may come next, the end among them."""
    try:
        mask = np.frombuffer(matcher.compute_bitmask(), np.int32)
    except ValueError as error:
        raise RequestError(_reason(matcher)) from error
    if matcher.is_error():  # its masks look like the end of the output
        raise RequestError(_reason(matcher))
    return mask


def _reason(matcher: LLMatcher) -> str:
    return matcher.get_error().partition("\n")[0] or "it accepts no more"


def bits(ids: range | tuple[int, ...], size: int) -> I32:
    """[words]: bit v % 32 of word v // 32 set for each v of `ids`, all below `size`."""
    flags = np.zeros(-(-size // 32) * 32, np.uint8)
    flags[np.asarray(ids, np.intp)] = 1
    return np.packbits(flags, bitorder="little").view(np.int32)
