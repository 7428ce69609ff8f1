"""What the README shows is what happens."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from gapless.runtime.core.options import options_table

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


COMMANDS = [
    shlex.split(line, comments=True)
    for block in blocks("sh")
    for line in block.splitlines()
    if line.startswith(("make ", ".venv/bin/gapless "))
]


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, cwd=ROOT)


def test_the_options_table_is_the_generated_one() -> None:
    shown = re.search(r"<!-- options -->\n(.*)<!-- /options -->", README, re.DOTALL)
    assert shown is not None
    assert shown[1] == options_table(), "run: make readme"


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_the_command_exists(command: list[str]) -> None:
    if command[0] == "make":
        dry = run("make", "--dry-run", *command[1:])
        assert dry.returncode == 0, dry.stderr
        return
    subcommand = command[1:3] if command[1] == "bench" else command[1:2]
    options = [word for word in command if word.startswith("--")]
    help = run(sys.executable, "-P", "-m", "gapless.runtime.cli", *subcommand, "--help")
    assert help.returncode == 0, help.stderr
    assert set(options) <= set(help.stdout.split())


def shape(value: Any) -> Any:
    """Keys and types."""
    if isinstance(value, dict):
        return {key: shape(item) for key, item in value.items()}
    return type(value)


def test_the_curl_example_gives_an_answer_of_the_shown_form(serve) -> None:
    (command,) = [block for block in blocks("sh") if block.startswith("curl")]
    body = shlex.split(command)[-1]
    (shown,) = blocks("json")
    server = serve("--toy=eos_at=100")
    answer = httpx.post(f"{server.url}/generate", content=body, timeout=60)
    assert answer.status_code == 200
    assert shape(answer.json()) == shape(json.loads(shown))


def test_the_python_examples_run() -> None:
    code, program = blocks("python")
    assert 'model_path="demo"' in code
    ended = run(sys.executable, "-P", "-c", code.replace('"demo"', '"toy", toy="eos_at=40"'))
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count(" 16\n") == 2
    assert 'Engine("demo")' in program
    ended = run(sys.executable, "-P", "-c", program.replace('"demo"', '"toy", toy="eos_at=40"'))
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.startswith("Two tips about sleeping well.\n-")
