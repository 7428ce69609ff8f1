"""A child process of the launcher or of an engine: how it starts, what it is told, and that it dies with its parent.

The child's standard input is a pipe. Its first line is the specification in JSON (so that no option shows in the
process list); after that it stays open, and its end means that the parent is gone.
"""

from __future__ import annotations

import ctypes
import dataclasses
import json
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from gapless.runtime.core.config import ServerConfig
from gapless.runtime.core.errors import ConfigError, ModelLoadError

EXIT_BAD_INPUT = 2
_PR_SET_PDEATHSIG = 1
log = logging.getLogger("gapless")


@dataclass(frozen=True)
class ChildSpec:
    """`directory` holds the sockets; `listen_fd` is the bound HTTP socket, for the HTTP process only."""

    config: ServerConfig
    directory: Path
    listen_fd: int | None = None
    parent_death_signal: bool = False  # only where the thread that spawns lives as long as the parent


def spawn(module: str, spec: ChildSpec) -> subprocess.Popen[bytes]:
    """Starts `python -m module` with `spec`; closing the child's stdin ends it."""
    fds = (spec.listen_fd,) if spec.listen_fd is not None else ()
    child = subprocess.Popen(
        [sys.executable, "-m", module], stdin=subprocess.PIPE, pass_fds=fds, start_new_session=True
    )
    fields = dataclasses.asdict(spec) | {"directory": str(spec.directory)}
    assert child.stdin is not None
    try:
        child.stdin.write(json.dumps(fields).encode() + b"\n")
        child.stdin.flush()
    except BrokenPipeError:
        log.error("%s died before it could be told its task", module)
    return child


def run_child(main: Callable[[ChildSpec], int]) -> None:
    """The child's side: reads the specification, sets up logging and exits with what `main` returns.

    A wrong option or model file gives one line on stderr and exit code 2. Ctrl-C is the parent's business.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    fields = json.loads(sys.stdin.buffer.readline())
    config = ServerConfig(**fields.pop("config"))
    spec = ChildSpec(config, Path(fields.pop("directory")), **fields)
    if spec.parent_death_signal and sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    threading.Thread(target=_die_with_parent, name="parent-watch", daemon=True).start()
    set_up_logging(config.log_level)
    try:
        code = main(spec)
    except (ConfigError, ModelLoadError) as error:
        print(f"gapless: {error.message}", file=sys.stderr)
        code = EXIT_BAD_INPUT
    except Exception:
        log.exception("%s failed", sys.argv[0])
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # a device thread that hangs must not keep the process alive


def set_up_logging(level: str) -> None:
    logging.basicConfig(
        level=level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr
    )


def _die_with_parent() -> None:
    while os.read(sys.stdin.fileno(), 4096):
        pass
    os._exit(1)
