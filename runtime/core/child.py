"""A child process of the launcher or of an engine: how it starts, what it is told, and that it dies with its parent.

The child's standard input is a pipe. Its first line is the specification in JSON (so that no option shows in the
process list); after that it stays open, and its end means that the parent is gone. A child that fails leaves the
reason in the private directory, where its parent reads it: stderr stays free for the log.
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
from gapless.runtime.core.errors import ConfigError, GaplessError, InternalError, ModelLoadError

EXIT_BAD_INPUT = 2
_PR_SET_PDEATHSIG = 1
_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)
log = logging.getLogger("gapless")


@dataclass(frozen=True)
class ChildSpec:
    """`directory` holds the sockets; `listen_fd` is the bound HTTP socket, for the HTTP process only."""

    config: ServerConfig
    directory: Path
    listen_fd: int | None = None
    parent_death_signal: bool = False  # only where the thread that spawns lives as long as the parent


class Child:
    """`python -m module` with `spec`; it ends when this process does. `name` is the module's package."""

    def __init__(self, module: str, spec: ChildSpec) -> None:
        self.name = module.split(".")[-2]
        self._directory = spec.directory
        # The child inherits the mask: a signal that comes before it can ignore it waits until then.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, _STOP_SIGNALS if spec.listen_fd is None else ())
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", module],  # -P: no file of the working directory shadows a module
                stdin=subprocess.PIPE,
                pass_fds=() if spec.listen_fd is None else (spec.listen_fd,),
                start_new_session=True,
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        assert self.process.stdin is not None
        fields = dataclasses.asdict(spec) | {"directory": str(spec.directory)}
        try:
            self.process.stdin.write(json.dumps(fields).encode() + b"\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            log.error("%s died before it could be told its task", self.name)

    def on_exit(self, call: Callable[[Child], object]) -> None:
        """Calls `call(self)` in a thread of its own once the process has ended."""

        def wait() -> None:
            self.process.wait()
            call(self)

        threading.Thread(target=wait, name=f"{self.name}-exit", daemon=True).start()

    def failure(self) -> GaplessError:
        """Why the process ended, in the class that its own error had: call it once it has."""
        try:
            report = json.loads(_report_path(self._directory, self.process.pid).read_bytes())
        except (OSError, ValueError):  # none, or half of one
            return InternalError(f"the {self.name} process died: {_exit_words(self.process.returncode)}")
        if report["code"] == ConfigError.code:
            return ConfigError(report["message"])
        if report["code"] == ModelLoadError.code:
            return ModelLoadError(report["message"])
        return InternalError(f"the {self.name} process died: {report['message']}")

    def kill(self) -> None:
        """Ends the process at once, also a stopped one."""
        self.process.kill()
        self.process.wait()
        if self.process.stdin is not None:
            self.process.stdin.close()


def run_child(main: Callable[[ChildSpec], int]) -> None:
    """The child's side: reads the specification, sets up logging and exits with what `main` returns.

    A wrong option or model file gives exit code 2 and no traceback: the parent says what it was. Ctrl-C is the
    parent's business, and so is SIGTERM, which some supervisors send to every process: only the HTTP process, which
    has requests to finish, gets one of its own.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    line = sys.stdin.buffer.readline()
    if not line.endswith(b"\n"):
        os._exit(1)  # the parent died while it spoke
    fields = json.loads(line)
    config = ServerConfig(**fields.pop("config"))
    spec = ChildSpec(config, Path(fields.pop("directory")), **fields)
    if spec.listen_fd is None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOP_SIGNALS)
    if spec.parent_death_signal:
        set_parent_death_signal(signal.SIGKILL)
    threading.Thread(target=_die_with_parent, name="parent-watch", daemon=True).start()
    set_up_logging(config.log_level)
    try:
        code = main(spec)
    except (ConfigError, ModelLoadError) as error:
        _report(spec, error.code, error.message)
        code = EXIT_BAD_INPUT
    except Exception as error:
        log.exception("%s failed", sys.argv[0])
        _report(spec, InternalError.code, f"{type(error).__name__}: {error}")
        code = 1
    print(end="", flush=True)  # unlike sys.stdout.flush() also where there is none
    print(end="", flush=True, file=sys.stderr)
    os._exit(code)  # a device thread that hangs must not keep the process alive


def set_parent_death_signal(number: signal.Signals) -> None:
    """Asks Linux to send `number` here when the thread that started this process ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)


def set_up_logging(level: str) -> None:
    logging.basicConfig(
        level=level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr
    )


def _report(spec: ChildSpec, code: str, message: str) -> None:
    try:
        _report_path(spec.directory, os.getpid()).write_text(json.dumps({"code": code, "message": message}))
    except OSError as error:
        log.error("%s (the parent cannot be told why: %s)", message, error)


def _report_path(directory: Path, pid: int) -> Path:
    return directory / f"failure-{pid}.json"


def _exit_words(returncode: int) -> str:
    if returncode >= 0:
        return f"exit code {returncode}"
    return f"killed by {signal.Signals(-returncode).name}"


def _die_with_parent() -> None:
    while os.read(sys.stdin.fileno(), 4096):
        pass
    os._exit(1)
