"""What the three processes say to each other.

Messages are msgspec structs, encoded as MessagePack arrays. Columns are bytes of little-endian numpy arrays, one
entry a row: the cost of a message hardly grows with the batch. `uid` is our own number for a request, unique in a
server's life; (slot, generation) names it between scheduler and detokenizer.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Annotated, Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from gapless.runtime.core.logprobs import LogprobParams, Logprobs
from gapless.runtime.core.sampling import SamplingParams


class Finish(IntEnum):
    """Why a request ended; `NONE` while it goes on."""

    NONE = 0
    STOP_TOKEN = 1  # the newest id is an EOS or one of stop_token_ids
    LENGTH = 2  # max_new_tokens, or the context, or the pool is full
    ABORT = 3  # asked for by the client or lost with its connection
    STOP_STRING = 4  # decided by the detokenizer alone
    FAILED = 5  # the engine could not go on with it


Int32 = Annotated[int, msgspec.Meta(ge=-(2**31), le=2**31 - 1)]
Int64 = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]


class _Message(msgspec.Struct, array_like=True, tag=True):
    pass


# ---------------------------------------------------------------- to the scheduler


class Submit(_Message):
    """A checked and tokenized request. `stop_ids` are all ids that end it: EOS ids unless ignored, and the user's."""

    uid: int
    input_ids: bytes  # int32
    params: SamplingParams
    stop_ids: tuple[Int32, ...]
    seed: Int64
    extra_key: str = ""
    cache_salt: str = ""
    priority: Int32 = 0  # more is more urgent
    grammar: str = ""  # what the output must match, in Lark, checked; empty: anything
    leader: int = -1  # uid of the first of n samples of one prompt, whose computed prompt this one shares
    logprobs: LogprobParams | None = None
    embed: bool = False  # the prompt's embedding is asked for, and no tokens
    group: str = ""  # of requests that belong together, such as those of one program
    hold: bool = False  # keep the prompt's whole pages in the cache until the group is released


class Abort(_Message):
    uid: int


class ReleaseGroup(_Message):
    """The group's requests have ended: what it holds may be evicted. One that is not there is no error."""

    group: str


class Stop(_Message):
    """A stop string was completed by output token number `output_len` (counted from 1): end there."""

    slot: Int32
    generation: int
    output_len: Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]


class Flush(_Message):
    """Forget all cached prefixes, if nothing runs or waits; answered by Flushed with the same number."""

    number: int
    model_path: str = ""  # take these weights before that


# ---------------------------------------------------------------- scheduler to detokenizer


class Opened(_Message):
    """A request got a slot; sent before its first ids."""

    uid: int
    slot: int
    generation: int
    prompt_tokens: int
    cached_tokens: int
    stop: tuple[str, ...]
    skip_special_tokens: bool
    no_stop_trim: bool
    min_new_tokens: int = 0


class Closed(_Message):
    """A request that ends without a new id: aborted, failed or refused, with or without ever having had a slot."""

    uid: int
    finish: int
    message: str = ""
    code: str = ""  # GaplessError.code where finish is FAILED
    prompt_tokens: int = 0


class StepOutput(_Message):
    """One retired step. Order within: opened, then the prompts' log probabilities, then the rows, then closed."""

    opened: list[Opened]
    slots: bytes  # int32 [R]
    generations: bytes  # int32 [R]
    ids: bytes  # int32 [R], the id that each row gained
    finish: bytes  # uint8 [R], Finish
    closed: list[Closed]
    # (slot, generation, whether of the prompt, N tokens'); of the output: one for each of the slot's rows, in order.
    # An embedding is of the prompt.
    logprobs: list[tuple[int, int, bool, Logprobs]] = []


class Heartbeat(_Message):
    """Proof that the loop turns. Passed on by the detokenizer, so it proves that one too."""

    sent_at: float  # time.monotonic(), seconds; one clock for all processes of a machine
    launch_age: float  # seconds since the oldest launch that has not retired; 0 when idle
    running: int
    waiting: int
    used_tokens: int
    step: int  # launches so far
    violations: int = 0  # how often the accounting at rest was not exact
    preemptions: int = 0  # so far


class Flushed(_Message):
    """The answer to a Flush; passed on by the detokenizer. Where it was refused, the counts say why."""

    number: int
    done: bool
    pages: int  # that were cached and are free now
    running: int
    waiting: int
    error: str = ""  # why the new weights could not be taken; the old ones stay, and so do the prefixes


class Ready(_Message):
    """The model is loaded. `info` joins /server_info."""

    vocab_size: int
    context_length: int
    max_total_tokens: int
    max_prompt_tokens: int  # the longest prompt that the context and the pool can hold
    eos_token_ids: tuple[int, ...]
    load_seconds: float
    info: dict[str, Any]
    hidden_size: int = 0  # of an embedding


class Fatal(_Message):
    """Nothing more will come: every open request fails with this."""

    message: str


# ---------------------------------------------------------------- detokenizer to the front


class Finished(_Message):
    """The one terminal message of a request."""

    uid: int
    finish: int
    matched: int | str | None  # the stop id or stop string
    message: str
    code: str
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


class TextOutput(_Message):
    """What each named request gained: its text and ids since the last message. Terminals come after the rows.

    Rows with an empty text are allowed: ids whose text is held back. On a stop string the ids end with the
    token that completed it.
    """

    uids: bytes  # int64 [R]
    texts: list[str]
    counts: bytes  # int32 [R], ids of each row
    ids: bytes  # int32, the rows' ids one after the other
    finished: list[Finished]
    opened: list[
        tuple[int, int, int]
    ]  # (uid, prompt_tokens, cached_tokens), sent with or before the first row
    # (uid, whether of the prompt, N tokens'); of the output: one for each id that the uid gains here, in order
    logprobs: list[tuple[int, bool, Logprobs]] = []


ToScheduler = Submit | Abort | Stop | Flush | ReleaseGroup
ToDetokenizer = StepOutput | Heartbeat | Flushed | Ready | Fatal
ToFront = TextOutput | Heartbeat | Flushed | Ready | Fatal


def column(values: Any, dtype: str) -> bytes:
    """A column from any array or sequence."""
    return np.ascontiguousarray(values, dtype=dtype).tobytes()


def int32s(data: bytes) -> NDArray[np.int32]:
    return np.frombuffer(data, "<i4")


def int64s(data: bytes) -> NDArray[np.int64]:
    return np.frombuffer(data, "<i8")


def uint8s(data: bytes) -> NDArray[np.uint8]:
    return np.frombuffer(data, "u1")
