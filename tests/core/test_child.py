"""A child gets its task by its standard input, says why it failed, and never outlives its parent."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gapless.runtime.core.child import EXIT_BAD_INPUT, Child, ChildSpec
from gapless.runtime.core.config import ServerConfig
from gapless.runtime.core.errors import ConfigError, GaplessError, InternalError, ModelLoadError
from gapless.runtime.core.ipc import private_directory

BODY = """
import os, signal, sys, time
from pathlib import Path
from gapless.runtime.core.child import ChildSpec, run_child
from gapless.runtime.core.errors import ConfigError, ModelLoadError

def main(spec):
{body}

run_child(main)
"""

Start = Callable[..., Child]


@pytest.fixture
def directory() -> Iterator[Path]:
    path = private_directory()
    yield path
    for entry in path.iterdir():
        entry.unlink()
    path.rmdir()


@pytest.fixture
def start(tmp_path: Path, directory: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Starts a child whose `main(spec)` has the given body."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    children: list[Child] = []

    def run(body: str, **fields: object) -> Child:
        package = tmp_path / f"fake{len(children)}"
        package.mkdir()
        (package / "__init__.py").touch()
        (package / "main.py").write_text(BODY.format(body="    " + body.replace("\n", "\n    ")))
        config = ServerConfig(model_path="toy", toy="delay_ms=5")
        children.append(Child(f"{package.name}.main", ChildSpec(config, directory, **fields)))  # type: ignore[arg-type]
        return children[-1]

    yield run
    for child in children:
        child.kill()


def ended(child: Child) -> int:
    return child.process.wait(timeout=20)


def wait_for(path: Path) -> str:
    deadline = time.monotonic() + 20
    while not (path.exists() and path.read_text()):
        assert time.monotonic() < deadline, f"{path.name} did not appear"
        time.sleep(0.01)
    return path.read_text()


def test_the_task_comes_by_standard_input_and_not_by_the_command_line(start: Start, directory: Path) -> None:
    child = start(
        "shown = Path('/proc/self/cmdline').read_text()\n"
        "(spec.directory / 'told').write_text(f'{spec.config.toy} {shown}')\nreturn 7"
    )
    assert ended(child) == 7
    told = (directory / "told").read_text()
    assert told.startswith("delay_ms=5 ")
    assert told.count("delay_ms") == 1


@pytest.mark.parametrize(
    ("raised", "kind", "code"),
    [
        ("ConfigError('--page-size 0')", ConfigError, EXIT_BAD_INPUT),
        ("ModelLoadError('no such file')", ModelLoadError, EXIT_BAD_INPUT),
        ("ValueError('device step 5')", InternalError, 1),
    ],
)
def test_a_failure_reaches_the_parent_in_its_own_class(
    start: Start, raised: str, kind: type[GaplessError], code: int, capfd: pytest.CaptureFixture[str]
) -> None:
    child = start(f"raise {raised}")
    assert ended(child) == code
    failure = child.failure()
    assert type(failure) is kind
    assert raised.split("'")[1] in failure.message
    assert ("Traceback" in capfd.readouterr().err) == (kind is InternalError)


def test_a_child_that_was_killed_is_named_with_its_signal(start: Start) -> None:
    child = start("time.sleep(60)\nreturn 0")
    child.process.send_signal(signal.SIGKILL)
    ended(child)
    assert child.failure().message == "the fake0 process died: killed by SIGKILL"


def test_a_child_that_was_killed_while_it_said_why(start: Start) -> None:
    child = start(
        "(spec.directory / f'failure-{os.getpid()}.json').write_text('{')\n"
        "os.kill(os.getpid(), signal.SIGKILL)\nreturn 0"
    )
    ended(child)
    assert child.failure().message == "the fake0 process died: killed by SIGKILL"


def test_a_child_whose_directory_is_gone_still_logs_why(
    start: Start, directory: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    child = start("spec.directory.rmdir()\nraise ModelLoadError('no such file')")
    assert ended(child) == EXIT_BAD_INPUT
    assert isinstance(child.failure(), InternalError)
    assert "no such file" in capfd.readouterr().err
    directory.mkdir()


def test_the_end_of_a_child_is_reported_once(start: Start) -> None:
    seen: list[Child] = []
    reported = threading.Event()
    child = start("return 3")
    child.on_exit(lambda dead: (seen.append(dead), reported.set()))
    assert reported.wait(20)
    assert seen == [child]
    assert child.process.returncode == 3


def test_a_child_ends_when_its_standard_input_does(start: Start) -> None:
    child = start("time.sleep(60)\nreturn 0")
    assert child.process.stdin is not None
    child.process.stdin.close()
    assert ended(child) == 1


def test_ctrl_c_is_left_to_the_parent(start: Start, directory: Path) -> None:
    child = start(
        "os.kill(os.getpid(), signal.SIGINT)\n(spec.directory / 'alive').write_text('yes')\nreturn 0"
    )
    assert ended(child) == 0
    assert (directory / "alive").exists()


def test_a_module_in_the_working_directory_does_not_shadow_the_library(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "json.py").write_text("raise SystemExit(9)")
    monkeypatch.chdir(elsewhere)
    assert ended(start("return 0")) == 0


@pytest.mark.skipif(sys.platform != "linux", reason="the parent-death signal is Linux's")
def test_a_stopped_child_dies_with_a_parent_that_was_killed(
    tmp_path: Path, directory: Path, watch: Callable[[int], Any]
) -> None:
    package = tmp_path / "fake"
    package.mkdir()
    (package / "__init__.py").touch()
    body = "    (spec.directory / 'pid').write_text(str(os.getpid()))\n    time.sleep(60)\n    return 0"
    (package / "main.py").write_text(BODY.format(body=body))
    parent_code = (
        "import time\nfrom pathlib import Path\n"
        "from gapless.runtime.core.child import Child, ChildSpec\n"
        "from gapless.runtime.core.config import ServerConfig\n"
        f"spec = ChildSpec(ServerConfig(), Path({str(directory)!r}), parent_death_signal=True)\n"
        "child = Child('fake.main', spec)\ntime.sleep(60)\n"
    )
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    with subprocess.Popen([sys.executable, "-P", "-c", parent_code], env=environment) as parent:
        gone = watch(int(wait_for(directory / "pid")))
        os.kill(gone.pid, signal.SIGSTOP)
        parent.kill()
        assert gone.within(5)
