"""The benchmarks under one roof: `gapless bench NAME`."""

from __future__ import annotations

import argparse
from typing import Any, Protocol

from gapless.bench import cache, compare, offline, overhead, overlap, programs, radix, shared_prefix
from gapless.bench.serve import command as serve


class Command(Protocol):
    """A module with a command: its first line says what it measures, the rest of its docstring how to read it."""

    __doc__: str | None

    def add_arguments(self, parser: argparse.ArgumentParser) -> None: ...

    def run(self, parsed: argparse.Namespace) -> int:
        """The exit code."""
        ...


COMMANDS: tuple[tuple[str, Command, str], ...] = (
    ("cache", cache, "hit rates of the prefix cache beside the best possible"),
    ("compare", compare, "what differs between two reports, or between repeated runs of two things"),
    (
        "offline",
        offline,
        "throughput of the engine without HTTP, beside its matrix products'; latency of one batch",
    ),
    ("overhead", overhead, "what the scheduler's loop costs the host, and what a step hides"),
    ("overlap", overlap, "what overlap hides, and what it costs, on the CPU with a real model"),
    ("programs", programs, "what the DSL's programs gain over plain calls, and over no prefix cache"),
    ("radix", radix, "what the prefix cache's operations cost, microseconds a call"),
    ("serve", serve, "throughput and latency of a running server, this one or another maker's"),
    (
        "shared-prefix",
        shared_prefix,
        "what the prefix cache saves where prompts begin alike, with a real model",
    ),
)


def add_commands(commands: Any) -> None:
    """Adds one subcommand for each benchmark; each sets `run` and `parser` in its namespace."""
    for name, command, help in COMMANDS:
        parser = commands.add_parser(
            name,
            help=help,
            description=command.__doc__,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.add_arguments(parser)
        parser.set_defaults(run=command.run, parser=parser)
