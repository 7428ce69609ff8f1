"""The process that renders a chat template, and its end when a rendering takes too long or too much."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping
from typing import Any

import msgspec

from gapless.runtime.tokenizer.chat_template import ChatTemplate, TemplateError

CPU_SECONDS = 2.0  # for one prompt
_COMMAND = (sys.executable, "-P", "-m", "gapless.runtime.tokenizer.chat_template_worker")


class Rendered(msgspec.Struct):
    """The prompt, or what is wrong."""

    text: str = ""
    error: str = ""


class Renderer:
    """Renders one at a time, for any thread. The process starts when it is first needed and ends with this object."""

    def __init__(self, template: ChatTemplate) -> None:
        self.template = template
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._finalizer: weakref.finalize[[subprocess.Popen[bytes]], Renderer] | None = None

    def render(self, variables: Mapping[str, Any]) -> str:
        """The prompt that the template makes of `variables` (JSON's values); raises TemplateError."""
        line = msgspec.json.encode(variables)
        with self._lock:
            process = self._process or self._start()
            answer = _ask(process, line)
            if not answer:
                assert self._finalizer is not None
                self._process = None
                if self._finalizer() == -signal.SIGPROF:
                    raise TemplateError(f"it took more than {CPU_SECONDS:g} s")
                raise TemplateError("it took more memory than it may, or broke its process")
        rendered = msgspec.json.decode(answer, type=Rendered)
        if rendered.error:
            raise TemplateError(rendered.error)
        return rendered.text

    def _start(self) -> subprocess.Popen[bytes]:
        process = self._process = subprocess.Popen(
            _COMMAND,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # what a template breaks is in the error
            start_new_session=True,  # Ctrl-C is not for it
        )
        self._finalizer = weakref.finalize(self, _end, process)
        assert process.stdin is not None
        process.stdin.write(msgspec.json.encode(self.template) + b"\n")
        return process


def _ask(process: subprocess.Popen[bytes], line: bytes) -> bytes:
    """The answer; empty where the process has ended."""
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(line + b"\n")
        process.stdin.flush()
    except BrokenPipeError:
        return b""
    answer = process.stdout.readline()
    return answer if answer.endswith(b"\n") else b""


def _end(process: subprocess.Popen[bytes]) -> int:
    """How the process has ended, where it had, else by this."""
    process.kill()
    code = process.wait()
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdout.close()
    with contextlib.suppress(BrokenPipeError):  # a line that it never read
        process.stdin.close()
    return code
