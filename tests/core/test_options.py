"""One dataclass declares every option: the command line, its help and the README's table all come from it."""

import dataclasses

import pytest

from gapless.runtime.core.config import ServerConfig, flag
from gapless.runtime.core.errors import ConfigError
from gapless.runtime.core.options import Parser, add_options, command_line, config_from, options_table

FIELDS = dataclasses.fields(ServerConfig)


def parse(*arguments: str) -> ServerConfig:
    parser = Parser(prog="gapless serve")
    add_options(parser)
    return config_from(parser, parser.parse_args(arguments))


def test_no_argument_gives_the_defaults() -> None:
    assert parse() == ServerConfig()


def test_every_option_can_be_given_and_comes_back_as_a_command_line() -> None:
    given = ServerConfig(
        model_path="toy", host="::1", port=0, page_size=1, mem_fraction_static=0.25, disable_radix_cache=True
    )
    assert parse(*command_line(given)) == given
    assert command_line(ServerConfig()) == []


def test_booleans_are_flags_that_are_off_by_default() -> None:
    flags = [field for field in FIELDS if field.type == "bool"]
    assert flags
    assert not any(field.default for field in flags)
    assert parse("--disable-overlap-schedule").disable_overlap_schedule


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--page-size", "0"], "--page-size 0"),
        (["--page-size", "65"], "--page-size 65"),
        (["--page-size", "x"], "--page-size"),
        (["--page-size"], "--page-size"),
        (["--port", "70000"], "--port 70000"),
        (["--dtype", "float8"], "--dtype"),
        (["--mem-fraction-static", "nan"], "--mem-fraction-static nan"),
        (["--watchdog-timeout", "nan"], "--watchdog-timeout nan"),
        (["--max-num-batched-tokens", "8"], "--max-num-batched-tokens 8"),
        (["--page-siz", "4"], "--page-siz"),
        (["--no-such-option"], "--no-such-option"),
    ],
)
def test_a_wrong_value_is_one_line_that_names_the_option(
    arguments: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        parse(*arguments)
    message = capsys.readouterr().err
    assert caught.value.code == 2
    assert named in message
    assert message.count("\n") == 1


@pytest.mark.parametrize(
    "values", [{"page_size": "4"}, {"page_size": True}, {"page_size": 1.5}, {"host": None}]
)
def test_a_value_of_another_type_is_refused(values: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=flag(next(iter(values)))):
        ServerConfig(**values)  # type: ignore[arg-type]


def test_help_and_table_name_every_option_once() -> None:
    parser = Parser(prog="gapless serve")
    add_options(parser)
    rows, words = options_table().splitlines()[2:], parser.format_help().replace("]", " ").split()
    assert len(rows) == len(FIELDS) < 60
    for field, row in zip(FIELDS, rows, strict=True):
        assert row.startswith(f"| `{flag(field.name)}` |")
        assert flag(field.name) in words
