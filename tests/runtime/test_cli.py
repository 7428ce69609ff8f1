"""The `gapless` command."""

import os
import signal
import subprocess
import sys

import pytest

import gapless
from gapless.runtime.core.options import options_table

GAPLESS = [sys.executable, "-P", "-m", "gapless.runtime.cli"]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*GAPLESS, *arguments], capture_output=True, text=True, timeout=60, check=False)


def test_version_and_options() -> None:
    assert run("--version").stdout == f"gapless {gapless.__version__}\n"
    assert run("options").stdout == options_table()


@pytest.mark.parametrize(
    "arguments", [(), ("nothing",), ("bench",), ("bench", "nothing"), ("serve", "extra")]
)
def test_a_wrong_command_is_one_line_and_exit_code_2(arguments: tuple[str, ...]) -> None:
    ended = run(*arguments)
    assert ended.returncode == 2
    assert len(ended.stderr.splitlines()) == 1
    assert ended.stdout == ""


@pytest.mark.parametrize("command", ["serve", "generate", "demo", "options", "bench"])
def test_every_command_has_help(command: str) -> None:
    ended = run(command, "--help")
    assert ended.returncode == 0
    assert ended.stdout.startswith(f"usage: gapless {command}")


def test_generate_prints_the_text_as_it_comes() -> None:
    options = ("--model-path=toy", "--toy=eos_at=9", "--max-new-tokens=4")
    ended = run("generate", "hello", *options)
    assert ended.returncode == 0, ended.stderr
    with gapless.Engine("toy", toy="eos_at=9") as engine:
        assert ended.stdout == engine.generate("hello", {"max_new_tokens": 4})["text"] + "\n"


def test_generate_refuses_a_wrong_parameter_with_its_name() -> None:
    ended = run("generate", "hello", "--model-path=toy", "--temperature=-1")
    assert ended.returncode == 1
    assert ended.stderr.startswith("gapless: temperature must be")
    assert len(ended.stderr.splitlines()) == 1


def test_demo_streams_two_completions_and_shows_the_shared_prefix() -> None:
    ended = run("demo", "--model-path=toy", "--toy=eos_at=1000", "--max-new-tokens=12")
    assert ended.returncode == 0, ended.stderr
    assert "cached_tokens 0," in ended.stdout
    *_, second, _, figures = ended.stdout.splitlines()
    assert int(second.split("cached_tokens ")[1].split(",")[0]) >= 600
    assert figures.startswith("load ")
    assert figures.endswith(" tokens/s")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--toy=raise_at_step=2"], "told to fail at step 2"),
        (["--model-path=/nonexistent"], "/nonexistent"),
    ],
)
def test_a_demo_that_fails_says_why_and_leaves_no_server(options: list[str], message: str) -> None:
    ended = run("demo", "--model-path=toy", "--max-new-tokens=12", *options)
    assert ended.returncode == 1
    assert message in ended.stderr


def test_ctrl_c_stops_the_demo_and_its_server(watch, children_of) -> None:
    with subprocess.Popen(
        [*GAPLESS, "demo", "--model-path=toy", "--toy=delay_ms=50,eos_at=1000", "--max-new-tokens=500"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
    ) as demo:
        assert demo.stdout is not None
        while not demo.stdout.readline().startswith(b"The lighthouse"):
            pass
        server = watch(*children_of(demo.pid))
        demo.send_signal(signal.SIGINT)
        assert demo.wait(20) == 130
        assert server.within(0)
