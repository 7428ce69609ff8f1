"""The benchmarks under one roof: `gapless bench NAME`."""

from __future__ import annotations

from typing import Any

from gapless.bench import cache, offline, overhead, overlap, radix, shared_prefix


def add_commands(commands: Any) -> None:
    """Adds one subcommand for each benchmark; each sets `run` and `parser` in its namespace."""
    parser = commands.add_parser("cache", help="hit rates of the prefix cache beside the best possible")
    cache.add_arguments(parser)
    parser.set_defaults(run=cache.run, parser=parser)
    parser = commands.add_parser(
        "offline", help="throughput of the engine without HTTP, beside its matrix products'"
    )
    offline.add_arguments(parser)
    parser.set_defaults(run=offline.run, parser=parser)
    parser = commands.add_parser(
        "overhead", help="what the scheduler's loop costs the host, and what a step hides"
    )
    overhead.add_arguments(parser)
    parser.set_defaults(run=overhead.run, parser=parser)
    parser = commands.add_parser(
        "overlap", help="what overlap hides, and what it costs, on the CPU with a real model"
    )
    overlap.add_arguments(parser)
    parser.set_defaults(run=overlap.run, parser=parser)
    parser = commands.add_parser("radix", help="what the prefix cache's operations cost, microseconds a call")
    radix.add_arguments(parser)
    parser.set_defaults(run=radix.run, parser=parser)
    parser = commands.add_parser(
        "shared-prefix", help="what the prefix cache saves where prompts begin alike, with a real model"
    )
    shared_prefix.add_arguments(parser)
    parser.set_defaults(run=shared_prefix.run, parser=parser)
