"""What is known of one request of a load: what was asked, and what came when. Times are seconds since the run began."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Item:
    """One request of a dataset.

    `prompt` is ids, a text, or chat messages. An item with `after` waits for the end of that item (its index in the
    dataset) and `delay` seconds more; its whole prompt is then that item's whole prompt, that item's answer, and
    `prompt`. `at` is when a trace sends it, in seconds since the start; it overrides the request rate.
    """

    prompt: list[int] | str | list[dict[str, Any]]
    prompt_len: int  # tokens of `prompt`
    output_len: int  # tokens asked for
    after: int | None = None
    delay: float = 0.0
    at: float | None = None
    group: int | None = None  # of prompts that begin alike, or of one conversation


@dataclass(slots=True)
class Chunk:
    """A piece of a stream that brought tokens. Empty ones and those with a role alone are none."""

    at: float
    tokens: int


@dataclass(slots=True)
class Record:
    """One request that was sent. Token counts are the server's; None where it says nothing."""

    index: int  # of the Item
    prompt_len: int  # of the whole prompt, by the client's count
    output_len: int  # asked for
    due: float  # when it should have been sent
    sent: float
    chunks: list[Chunk] = field(default_factory=list)
    ended: float = 0.0
    error: str = ""  # why it failed; empty: it did not
    cut: bool = False  # it was still running when the run's time was up: neither completed nor failed
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    retokenized: int = 0  # tokens of `text` by the client's tokenizer
    finish_reason: str = ""  # stop, length, abort
    text: str = ""
    output_ids: list[int] | None = None

    @property
    def completed(self) -> bool:
        return not self.error and not self.cut

    @property
    def output_tokens(self) -> int:
        """The server's count, else the client's."""
        return self.retokenized if self.completion_tokens is None else self.completion_tokens
