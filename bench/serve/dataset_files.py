"""The datasets that are files: conversations, a trace, and lines of the user's own.

All raise ConfigError where the file cannot be used, naming the line or, in JSON that is one list, the entry: $[3] is
the fourth.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec

from gapless.bench.random_ids import Ids, RandomIds
from gapless.bench.serve.record import Item
from gapless.runtime.core.errors import ConfigError
from gapless.runtime.tokenizer.base import Tokenizer

SHAREGPT_LEAST = 4  # tokens of a prompt, and of an answer whose length counts
SHAREGPT_LONGEST_PROMPT, SHAREGPT_LONGEST = 1024, 2048  # tokens of a prompt, and of prompt and answer
BLOCK = 512  # tokens that one hash id of a trace stands for

Positive = Annotated[int, msgspec.Meta(ge=1)]
NotNegative = Annotated[int, msgspec.Meta(ge=0)]
Line = TypeVar("Line", bound=msgspec.Struct)


class Turn(msgspec.Struct):
    """As ShareGPT spells it, or as chat messages do."""

    value: str | None = None
    content: str | None = None

    def __post_init__(self) -> None:
        if self.value is None and self.content is None:
            raise ValueError("has neither value nor content")

    @property
    def text(self) -> str:
        return self.value if self.value is not None else self.content or ""


class Conversation(msgspec.Struct):
    conversations: list[Turn]


class TraceLine(msgspec.Struct):
    timestamp: float  # milliseconds
    input_length: Positive
    output_length: Positive
    hash_ids: list[NotNegative]

    def __post_init__(self) -> None:
        if len(self.hash_ids) * BLOCK < self.input_length:
            raise ValueError(
                f"{len(self.hash_ids)} hash_ids are too few for input_length {self.input_length}"
            )


class CustomLine(msgspec.Struct):
    prompt: str | list[NotNegative] | None = None
    text: str | None = None
    messages: list[dict[str, Any]] | None = None
    conversations: Annotated[list[Turn], msgspec.Meta(min_length=1)] | None = None
    output_len: Positive | None = None
    max_tokens: Positive | None = None
    timestamp: float | None = None  # seconds

    def __post_init__(self) -> None:
        if [self.prompt, self.text, self.messages, self.conversations].count(None) != 3:
            raise ValueError("needs one of prompt, text, messages and conversations")


class MessagePart(msgspec.Struct):
    text: str = ""  # of a part that is no text, such as a picture, nothing counts


class Message(msgspec.Struct):
    role: str
    content: str | list[MessagePart] | None = None

    @property
    def text(self) -> str:
        if isinstance(self.content, list):
            return "".join(part.text for part in self.content)
        return self.content or ""


def sharegpt(parsed: argparse.Namespace, tokenizer: Tokenizer, random: RandomIds) -> list[Item]:
    """The first two turns of conversations, prompt and answer, shuffled; those too short or too long are left out."""
    path: Path = parsed.dataset_path
    try:
        entries = msgspec.json.decode(path.read_bytes(), type=list[Conversation])
    except ValueError as error:
        raise ConfigError(f"--dataset-path {path}: {error}") from error
    order = random.shuffled(len(entries))
    turns = (entries[number].conversations[:2] for number in order if len(entries[number].conversations) > 1)
    items = (_sharegpt_item(prompt.text, answer.text, parsed, tokenizer) for prompt, answer in turns)
    chosen = list(islice((item for item in items if item is not None), parsed.num_prompts))
    if not chosen:
        raise ConfigError(f"--dataset-path {path}: none of its {len(entries)} entries can be used")
    return chosen


def mooncake_trace(parsed: argparse.Namespace, vocabulary: Ids) -> list[Item]:
    """A trace's requests at its times; which ids a block has follows from its hash id and the seed."""

    @cache
    def block(hash_id: int) -> list[int]:
        ids: list[int] = RandomIds((parsed.seed, hash_id), vocabulary).ids(BLOCK).tolist()
        return ids

    def item(line: TraceLine) -> Item:
        length = line.input_length
        prompt = [token for hash_id in line.hash_ids for token in block(hash_id)][:length]
        at = line.timestamp / 1000 * parsed.mooncake_slowdown_factor
        return Item(prompt, length, line.output_length, at=at)

    return _from_first(_read_lines(parsed, TraceLine, item))


def custom(parsed: argparse.Namespace, tokenizer: Tokenizer, vocab_size: int) -> list[Item]:
    """The first lines, in their order; those with a timestamp are sent at that time."""

    def item(line: CustomLine) -> Item:
        prompt, length = _custom_prompt(line, tokenizer, vocab_size)
        if length == 0:
            raise ValueError("the prompt is empty")
        output_len = line.output_len or line.max_tokens
        if output_len is None and line.conversations is not None and len(line.conversations) > 1:
            output_len = len(tokenizer.encode(line.conversations[1].text, add_special_tokens=False))
        return Item(prompt, length, output_len or parsed.custom_output_len, at=line.timestamp)

    return _from_first(_read_lines(parsed, CustomLine, item))


def _sharegpt_item(prompt: str, answer: str, parsed: argparse.Namespace, tokenizer: Tokenizer) -> Item | None:
    """None where it is too short or too long."""
    ids, context_len = tokenizer.encode(prompt), parsed.sharegpt_context_len
    if len(ids) < SHAREGPT_LEAST or (context_len is None and len(ids) > SHAREGPT_LONGEST_PROMPT):
        return None
    output_len = parsed.sharegpt_output_len
    if output_len is None:
        output_len = len(tokenizer.encode(answer, add_special_tokens=False))
        if output_len < SHAREGPT_LEAST:
            return None
    if len(ids) + output_len > (context_len or SHAREGPT_LONGEST):
        return None
    return Item(ids, len(ids), output_len)


def _custom_prompt(
    line: CustomLine, tokenizer: Tokenizer, vocab_size: int
) -> tuple[list[int] | list[dict[str, Any]], int]:
    """The prompt and its tokens; of messages without what a chat template adds."""
    if line.messages is not None:
        messages = msgspec.convert(line.messages, list[Message])
        texts = tokenizer.encode_batch([message.text for message in messages], add_special_tokens=False)
        return line.messages, sum(map(len, texts))
    if isinstance(line.prompt, list):
        if too_large := [token for token in line.prompt if token >= vocab_size]:
            raise ValueError(f"id {too_large[0]} in a prompt: the model has {vocab_size} ids")
        return line.prompt, len(line.prompt)
    text = line.conversations[0].text if line.conversations else line.prompt or line.text or ""
    ids = tokenizer.encode(text)
    return ids, len(ids)


def _read_lines(parsed: argparse.Namespace, kind: type[Line], item: Callable[[Line], Item]) -> list[Item]:
    """What `item` makes of each of the first lines; a ValueError names its line."""
    items, decoder = list[Item](), msgspec.json.Decoder(kind)
    with parsed.dataset_path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if len(items) == parsed.num_prompts:
                break
            if not line.strip():
                continue
            try:
                items.append(item(decoder.decode(line)))
            except ValueError as error:
                raise ConfigError(f"--dataset-path {parsed.dataset_path}: line {number}: {error}") from error
    if not items:
        raise ConfigError(f"--dataset-path {parsed.dataset_path}: it has no lines")
    return items


def _from_first(items: list[Item]) -> list[Item]:
    """With times that count from the first."""
    first = min((item.at for item in items if item.at is not None), default=0.0)
    return [item if item.at is None else replace(item, at=item.at - first) for item in items]
