"""The `gapless` command."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Callable, Sequence
from typing import Any

import gapless
from gapless.runtime.core.child import EXIT_BAD_INPUT, set_up_logging
from gapless.runtime.core.errors import ConfigError, GaplessError, ModelLoadError
from gapless.runtime.core.keys import take_keys
from gapless.runtime.core.options import Parser, add_options, config_from, options_table
from gapless.runtime.core.sampling import SamplingParams

Run = Callable[[argparse.Namespace], int]
EXIT_INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code: 0, 1 for a failure, 2 for a wrong option or model."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    _open_standard_descriptors()
    parser = _parser(with_bench=given[:1] == ["bench"])
    parsed = parser.parse_args(given)
    try:
        return int(parsed.run(parsed))
    except GaplessError as error:
        print(f"gapless: {error.message}", file=sys.stderr)
        return EXIT_BAD_INPUT if isinstance(error, ConfigError | ModelLoadError) else 1
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:  # whoever read the output has had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # for what is flushed at exit
        return 128 + signal.SIGPIPE


def _open_standard_descriptors() -> None:
    """Where one of 0, 1 and 2 is closed, as some supervisors have it, a socket would get its number."""
    while (opened := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(opened, True)
    os.close(opened)


def _parser(*, with_bench: bool) -> Parser:
    parser = Parser(prog="gapless", description="Serves language models with no gaps on the device.")
    parser.add_argument("--version", action="version", version=f"gapless {gapless.__version__}")
    commands = parser.add_subparsers(metavar="command", required=True)

    def command(name: str, run: Run, help: str) -> Any:
        sub = commands.add_parser(name, help=help, description=help[0].upper() + help[1:] + ".")
        sub.set_defaults(run=run, parser=sub)
        return sub

    add_options(command("serve", _serve, "start the HTTP server"))
    generate = command("generate", _generate, "continue a text in the terminal, without a server")
    generate.add_argument("text", help="the prompt")
    generate.add_argument("--max-new-tokens", type=int, default=128, metavar="INT", help="(default: 128)")
    generate.add_argument("--temperature", type=float, default=0.0, metavar="FLOAT", help="(default: 0)")
    generate.add_argument("--sampling-seed", type=int, metavar="INT", help="makes a temperature repeatable")
    add_options(generate)
    generate.set_defaults(log_level="warning")
    demo = command("demo", _demo, "start a server with the demo model, ask it twice, and stop it")
    demo.add_argument("--max-new-tokens", type=int, default=64, metavar="INT", help="(default: 64)")
    add_options(demo)
    command("options", _options, "print the table of the server's options in Markdown")
    bench = commands.add_parser("bench", help="measure")
    if with_bench:  # its modules are loaded for this command alone
        from gapless.bench.cli import add_commands

        add_commands(bench.add_subparsers(metavar="benchmark", required=True))
    return parser


def _serve(parsed: argparse.Namespace) -> int:
    from gapless.runtime.launch import launch

    config = take_keys(config_from(parsed.parser, parsed))
    set_up_logging(config.log_level)
    return launch(config)


def _generate(parsed: argparse.Namespace) -> int:
    from gapless.runtime.engine import Engine

    config = config_from(parsed.parser, parsed, incremental_streaming_output=True)
    set_up_logging(config.log_level)
    names = ("max_new_tokens", "temperature", "sampling_seed")
    params = {name: getattr(parsed, name) for name in names}
    SamplingParams.parse(params)  # a wrong value shows before the model loads
    with Engine(**config.public()) as engine:
        for chunk in engine.generate(parsed.text, params, stream=True):
            print(chunk["text"], end="", flush=True)
    print()
    return 0


def _demo(parsed: argparse.Namespace) -> int:
    from gapless.runtime.demo import demo

    return demo(config_from(parsed.parser, parsed), parsed.max_new_tokens)


def _options(_: argparse.Namespace) -> int:
    print(options_table(), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
