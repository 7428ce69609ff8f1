"""The `gapless` command."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time

import httpx
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


def test_generate_ends_with_its_reader() -> None:
    """`gapless generate ... | head`: no traceback."""
    command = [*GAPLESS, "generate", "hello", "--model-path=toy", "--toy=delay_ms=5,eos_at=3000"]
    with subprocess.Popen([*command, "--max-new-tokens=2000"], stdout=-1, stderr=-1) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.read(1)
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(30) == 128 + signal.SIGPIPE


def test_serve_without_standard_descriptors() -> None:
    """Started with 0, 1 and 2 closed: no socket takes the number of one of them."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [*GAPLESS, "serve", "--model-path=toy", f"--port={port}"]
    with subprocess.Popen(["sh", "-c", 'exec "$@" 0<&- 1>&- 2>&-', "sh", *command]) as process:
        deadline, status = time.monotonic() + 60, 0
        while status != 200:
            assert time.monotonic() < deadline
            assert process.poll() is None
            with contextlib.suppress(httpx.TransportError):
                status = httpx.get(f"http://127.0.0.1:{port}/health", timeout=5).status_code
            time.sleep(0.02)
        process.terminate()
        assert process.wait(30) == 0


def test_generate_refuses_a_wrong_parameter_with_its_name() -> None:
    ended = run("generate", "hello", "--model-path=toy", "--temperature=-1")
    assert ended.returncode == 1
    assert ended.stderr.startswith("gapless: temperature must be")
    assert len(ended.stderr.splitlines()) == 1


def test_demo_streams_two_completions_and_shows_the_shared_prefix(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a key for servers stands in the environment: the demo's has none."""
    monkeypatch.setenv("GAPLESS_API_KEY", "sesame")
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
