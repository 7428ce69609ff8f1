"""The command line and the README's table, both made from ServerConfig's fields."""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any, NoReturn

from gapless.runtime.core.config import ServerConfig, flag
from gapless.runtime.core.errors import ConfigError

_TYPES: dict[str, type] = {"str": str, "int": int, "float": float}


class Parser(argparse.ArgumentParser):
    """A wrong option gives one line that names it, and exit code 2."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**{"allow_abbrev": False, **kwargs})

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message.removeprefix('argument ')}\n")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds one argument for each field of ServerConfig. Booleans become flags."""
    group = parser.add_argument_group("options of the server and its engine")
    for field in dataclasses.fields(ServerConfig):
        help = str(field.metadata["help"]).replace("%", "%%")
        if field.type == "bool":
            group.add_argument(flag(field.name), action="store_true", help=help)
            continue
        if field.default != "":
            help += f" (default: {field.default})"
        choices = field.metadata["choices"]
        group.add_argument(
            flag(field.name),
            type=_TYPES[str(field.type)],
            default=field.default,
            metavar="{" + ",".join(choices) + "}" if choices else str(field.type).upper(),
            help=help,
        )


def config_from(parser: argparse.ArgumentParser, parsed: argparse.Namespace, **fixed: Any) -> ServerConfig:
    """The checked configuration; `fixed` are the options that a command sets itself. Exits like `parser.error`."""
    values = {field.name: getattr(parsed, field.name) for field in dataclasses.fields(ServerConfig)}
    try:
        return ServerConfig(**values | fixed)
    except ConfigError as error:
        parser.error(error.message)


def command_line(config: ServerConfig) -> list[str]:
    """The arguments that give `config`, secrets aside: those options that differ from their defaults."""
    arguments: list[str] = []
    for field in dataclasses.fields(ServerConfig):
        value = getattr(config, field.name)
        if value != field.default and not field.metadata["secret"]:
            arguments.append(flag(field.name) if field.type == "bool" else f"{flag(field.name)}={value}")
    return arguments


def options_table() -> str:
    """The options as a Markdown table, one line each, with a closing newline."""
    rows = ["| Option | Default | Meaning |", "|---|---|---|"]
    for field in dataclasses.fields(ServerConfig):
        default = "off" if field.type == "bool" else f"`{field.default}`" if field.default != "" else ""
        meaning = field.metadata["help"]
        if field.metadata["choices"]:
            meaning += "; one of " + ", ".join(f"`{choice}`" for choice in field.metadata["choices"])
        rows.append(f"| `{flag(field.name)}` | {default} | {meaning} |")
    return "\n".join(rows) + "\n"
