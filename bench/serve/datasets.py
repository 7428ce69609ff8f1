"""The requests of a load: `--dataset-name`, its options, and the items that come of them.

Names and defaults are those of SGLang's bench_serving where it has them. Prompts are ids of exact length, or text that
the tokenizer has turned into ids; `custom` may hold chat messages. An item depends on the seed, the tokenizer and the
lengths asked for, not on how many others there are: a longer `random` or `multi-turn` load begins with the shorter one.
"""

from __future__ import annotations

import argparse
import math
import os
from pathlib import Path

import numpy as np

from gapless.bench.random_ids import Ids, RandomIds
from gapless.bench.serve import dataset_files
from gapless.bench.serve.record import Item
from gapless.runtime.core.config import flag
from gapless.runtime.core.errors import ConfigError
from gapless.runtime.tokenizer.base import Tokenizer

SYNTHETIC = ("random", "generated-shared-prefix", "multi-turn")
FROM_FILES = ("sharegpt", "mooncake-trace", "custom")
SIZES: dict[str, tuple[int | None, str]] = {
    "num_prompts": (1000, "requests of random, and at most of a file"),
    "random_input_len": (1024, "random: most tokens of a prompt"),
    "random_output_len": (1024, "random: most tokens of an answer"),
    "sharegpt_output_len": (None, "sharegpt: tokens of each answer; else as many as the file's answer has"),
    "sharegpt_context_len": (
        None,
        "sharegpt: leaves out what is longer in all; else prompts above 1024 and what is above 2048 in all",
    ),
    "gsp_num_groups": (64, "generated-shared-prefix: groups, each with a system prompt of its own"),
    "gsp_prompts_per_group": (16, "generated-shared-prefix: requests of a group"),
    "gsp_system_prompt_len": (2048, "generated-shared-prefix: tokens that a group shares"),
    "gsp_question_len": (128, "generated-shared-prefix: tokens that follow them"),
    "gsp_output_len": (256, "generated-shared-prefix: tokens of an answer"),
    "multi_turn_num_users": (32, "multi-turn: conversations"),
    "multi_turn_turns": (8, "multi-turn: requests of a conversation, each after the answer before"),
    "multi_turn_system_len": (512, "multi-turn: tokens of the system prompt, the same for all"),
    "multi_turn_text_len": (64, "multi-turn: tokens that a user adds at each turn"),
    "multi_turn_output_len": (64, "multi-turn: tokens of an answer"),
    "custom_output_len": (256, "custom: tokens of an answer where the line says nothing"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of all datasets; `--seed` is the command's own."""
    group = parser.add_argument_group("dataset")
    group.add_argument(
        "--dataset-name", choices=(*SYNTHETIC, *FROM_FILES), default="random", help="(default: random)"
    )
    group.add_argument(
        "--dataset-path",
        type=Path,
        metavar="FILE",
        help="sharegpt: JSON, a list of {conversations: [{value}, ...]}; mooncake-trace: JSON lines with timestamp "
        "(ms), input_length, output_length and hash_ids, each of which stands for the same 512 tokens wherever it is; "
        "custom: JSON lines with prompt (text or ids), text, messages or conversations, and where wanted output_len "
        "or max_tokens, and timestamp (s)",
    )
    for name, (default, help) in SIZES.items():
        help += "" if default is None else f" (default: {default})"
        group.add_argument(flag(name), type=int, default=default, metavar="INT", help=help)

    def number(name: str, default: float, help: str) -> None:
        help += f" (default: {default:g})"
        group.add_argument(flag(name), type=float, default=default, metavar="FLOAT", help=help)

    number(
        "random_range_ratio", 0.0, "random: lengths are uniform between this share of the most, and the most"
    )
    number("multi_turn_delay", 1.0, "multi-turn: mean seconds from an answer to the next turn, exponential")
    number("mooncake_slowdown_factor", 1.0, "mooncake-trace: times between requests are this much longer")


def check(parsed: argparse.Namespace) -> None:
    """Raises ConfigError naming the option that is wrong; what a file holds is checked where items are made."""
    for name in SIZES:
        value = getattr(parsed, name)
        if value is not None and value < 1:
            raise ConfigError(f"{flag(name)} {value}: must be at least 1")
    if parsed.seed < 0:
        raise ConfigError(f"--seed {parsed.seed}: must be at least 0")
    if not 0 <= parsed.random_range_ratio <= 1:
        raise ConfigError(f"--random-range-ratio {parsed.random_range_ratio:g}: must be between 0 and 1")
    if not 0 <= parsed.multi_turn_delay < math.inf:
        raise ConfigError(f"--multi-turn-delay {parsed.multi_turn_delay:g}: must be at least 0 and finite")
    if not 0 < parsed.mooncake_slowdown_factor < math.inf:
        raise ConfigError(
            f"--mooncake-slowdown-factor {parsed.mooncake_slowdown_factor:g}: must be above 0 and finite"
        )
    name, path = parsed.dataset_name, parsed.dataset_path
    if name in SYNTHETIC and path is not None:
        raise ConfigError(f"--dataset-path {path}: --dataset-name {name} reads no file")
    if name in FROM_FILES and path is None:
        raise ConfigError(f"--dataset-name {name} needs --dataset-path")
    if path is not None and not (path.is_file() and os.access(path, os.R_OK)):
        raise ConfigError(f"--dataset-path {path}: there is no such file, or it cannot be read")


def make_items(parsed: argparse.Namespace, tokenizer: Tokenizer, vocab_size: int) -> list[Item]:
    """The dataset of checked options, at least one item, its ids below `vocab_size`.

    Raises ConfigError naming the line or entry of a file that cannot be used.
    """
    vocabulary = plain_ids(tokenizer, vocab_size)
    random = RandomIds(parsed.seed, vocabulary)
    match parsed.dataset_name:
        case "random":
            return _random(parsed, random)
        case "generated-shared-prefix":
            return _generated_shared_prefix(parsed, random)
        case "multi-turn":
            return _multi_turn(parsed, random)
        case "sharegpt":
            return dataset_files.sharegpt(parsed, tokenizer, random)
        case "mooncake-trace":
            return dataset_files.mooncake_trace(parsed, vocabulary)
        case "custom":
            return dataset_files.custom(parsed, tokenizer, vocab_size)
        case name:
            raise ConfigError(f"--dataset-name {name}: no such dataset")


def plain_ids(tokenizer: Tokenizer, vocab_size: int) -> Ids:
    """Ascending: the ids that model and tokenizer both have, without special tokens and those that end an answer."""
    every = np.arange(min(vocab_size, tokenizer.vocab_size), dtype=np.int32)
    special = np.array([*tokenizer.special_ids, *tokenizer.eos_token_ids], np.int32)
    return np.setdiff1d(every, special)


def _random(parsed: argparse.Namespace, random: RandomIds) -> list[Item]:
    def length(most: int) -> int:
        return random.between(max(1, int(most * parsed.random_range_ratio)), most)

    items = list[Item]()
    for _ in range(parsed.num_prompts):
        prompt_len, output_len = length(parsed.random_input_len), length(parsed.random_output_len)
        items.append(Item(random.ids(prompt_len).tolist(), prompt_len, output_len))
    return items


def _generated_shared_prefix(parsed: argparse.Namespace, random: RandomIds) -> list[Item]:
    """All groups shuffled together."""
    items = list[Item]()
    for group in range(parsed.gsp_num_groups):
        prefix = random.ids(parsed.gsp_system_prompt_len)
        for _ in range(parsed.gsp_prompts_per_group):
            prompt = np.concatenate([prefix, random.ids(parsed.gsp_question_len)])
            items.append(Item(prompt.tolist(), len(prompt), parsed.gsp_output_len, group=group))
    return [items[number] for number in random.shuffled(len(items))]


def _multi_turn(parsed: argparse.Namespace, random: RandomIds) -> list[Item]:
    """One user's turns after the other's; the first of each begins with the system prompt."""
    system, items = random.ids(parsed.multi_turn_system_len), list[Item]()
    for user in range(parsed.multi_turn_num_users):
        after: int | None = None
        prompt, delay = system, 0.0
        for _ in range(parsed.multi_turn_turns):
            prompt = np.concatenate([prompt, random.ids(parsed.multi_turn_text_len)])
            items.append(
                Item(prompt.tolist(), len(prompt), parsed.multi_turn_output_len, after, delay, group=user)
            )
            prompt, after, delay = prompt[:0], len(items) - 1, random.seconds(parsed.multi_turn_delay)
    return items
