"""What docs/frontend.md shows is what happens, on the toy model."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/frontend.md").read_text()
URL = "http://127.0.0.1:30000"
COMMANDS = [
    line.split("#")[0].split()
    for block in re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL)
    for line in block.splitlines()
]


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=100, check=False, cwd=ROOT)


def only_code() -> str:
    """The Python blocks, on the lines that they have on the page."""
    lines, inside = [], False
    for line in PAGE.splitlines():
        if line.startswith("```"):
            inside = line == "```python"
            line = ""
        lines.append(line if inside else "")
    return "\n".join(lines)


def test_the_blocks_run_one_after_the_other_and_print_what_is_shown(serve: Any, tmp_path: Path) -> None:
    code = only_code().replace('Engine("demo"', 'Engine("toy"').replace(URL, serve().url)
    script = tmp_path / "frontend.py"
    script.write_text(code)
    ended = run(sys.executable, "-W", "error", str(script))
    assert ended.returncode == 0, ended.stderr
    shown = re.findall(r"```text\n(.*?)```", PAGE, re.DOTALL)
    assert len(shown) == 2
    for output in shown:
        assert output in ended.stdout


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_the_command_exists(command: list[str]) -> None:
    program, *words = command
    options = {word for word in words if word.startswith("--")}
    names = [word for word in words[:2] if not word.startswith("-")]
    if program == ".venv/bin/gapless":
        help = run(sys.executable, "-P", "-m", "gapless.runtime.cli", *names, "--help")
    else:
        help = run(sys.executable, words[0], "--help")
    assert help.returncode == 0, help.stderr
    assert options <= set(help.stdout.split())


def test_links_lead_to_headings() -> None:
    headings = {
        re.sub(r"[^a-z0-9 -]", "", heading.lower()).replace(" ", "-")
        for heading in re.findall(r"^#+ (.*)$", PAGE, re.MULTILINE)
    }
    links = set(re.findall(r"\]\(#(.*?)\)", PAGE))
    assert links and links <= headings
