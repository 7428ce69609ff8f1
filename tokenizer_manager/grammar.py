"""Checks of what constrains an output (`json_schema`, `regex`, `ebnf`), before the request is admitted.

They run in a process of their own, one after the other, while this one goes on. A grammar that takes longer than the
deadline, or kills the process, is refused, and the next one gets a new process.
"""

from __future__ import annotations

import asyncio
import logging
import subprocess
import sys
import threading
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor

import msgspec

from gapless.runtime.core.errors import InternalError, RequestError, UnavailableError
from gapless.tokenizer_manager.grammar_frames import Checked, Grammar, read_frame, write_frame
from gapless.tokenizer_manager.schema import Prompt

MAX_REMEMBERED = 512  # verdicts
MAX_REMEMBERED_CHARS = 16 << 20  # of their grammars, as they came and in Lark
_START_SECONDS = 60.0  # for the process to be ready, on a busy machine
_MODULE = "gapless.tokenizer_manager.grammar_worker"
log = logging.getLogger("gapless.http")


class Grammars:
    """For one event loop. `timeout` is in seconds; `close` ends the process."""

    def __init__(self, timeout: float, *, enabled: bool = True) -> None:
        self._enabled = enabled
        self._worker = Worker(timeout)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="gapless-grammar")
        self._running: dict[tuple[str, str], asyncio.Task[Checked]] = {}
        self._verdicts: OrderedDict[tuple[str, str], Checked] = OrderedDict()
        self._chars = 0
        self._closed = False

    async def lark(self, prompt: Prompt) -> str:
        """The grammar of the prompt's output in Lark, empty where there is none; RequestError where it is bad."""
        if (key := prompt.params.grammar) is None:
            return ""
        field = f"{prompt.params_field}.{key[0]}"
        if not self._enabled:
            raise RequestError(f"{field}: structured output is off here (--grammar-backend)", param=field)
        checked = self._verdicts.get(key)
        if checked is None:
            # A task of its own: a caller that goes away leaves the answer to whoever asks next.
            task = self._running.get(key)
            if task is None:
                task = self._running[key] = asyncio.create_task(self._check(key))
            checked = await asyncio.shield(task)
        else:
            self._verdicts.move_to_end(key)
        if checked.error:
            raise RequestError(f"{field}: {checked.error}", param=field)
        return checked.lark

    def close(self) -> None:
        self._closed = True
        self._worker.close()
        self._thread.shutdown(wait=False)  # what waits there finds the worker closed

    async def _check(self, key: tuple[str, str]) -> Checked:
        loop = asyncio.get_running_loop()
        try:
            if self._closed:
                raise UnavailableError("the server is shutting down")
            checked = await loop.run_in_executor(self._thread, self._worker.check, Grammar(*key))
        finally:
            del self._running[key]
        self._verdicts[key] = checked
        self._chars += _size(key, checked)
        while len(self._verdicts) > MAX_REMEMBERED or self._chars > MAX_REMEMBERED_CHARS:
            self._chars -= _size(*self._verdicts.popitem(last=False))
        return checked


class Worker:
    """The process, which starts when it is first needed. `check` is for one thread, `close` for any."""

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self._lock = threading.Lock()  # over the process: who may start it or end it
        self._process: subprocess.Popen[bytes] | None = None
        self._closed = False

    def check(self, grammar: Grammar) -> Checked:
        """Raises InternalError where the process does not start, UnavailableError once it was closed."""
        process = self._started()
        answer = _ask(process, msgspec.msgpack.encode(grammar), self._timeout)
        if isinstance(answer, Checked):
            return answer
        self._end()
        if self._closed:
            raise UnavailableError("the server is shutting down")
        log.warning("a grammar was refused: its check %s", answer)
        return Checked(error=f"checking it {answer}")

    def close(self) -> None:
        with self._lock:
            self._closed = True
        self._end()

    def _started(self) -> subprocess.Popen[bytes]:
        with self._lock:
            if self._closed:
                raise UnavailableError("the server is shutting down")
            if self._process is None or self._process.poll() is not None:
                _bury(self._process)
                self._process = subprocess.Popen(
                    [sys.executable, "-P", "-m", _MODULE],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    start_new_session=True,  # Ctrl-C is not for it
                )
                fresh = self._process
            else:
                return self._process
        if not isinstance(_ask(fresh, b"", _START_SECONDS), Checked):
            self._end()
            raise InternalError("the process that checks grammars does not start")
        return fresh

    def _end(self) -> None:
        with self._lock:
            process, self._process = self._process, None
        _bury(process)


def _bury(process: subprocess.Popen[bytes] | None) -> None:
    """Ends it, if it has not ended, and closes its pipes."""
    if process is not None:
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()


def _ask(process: subprocess.Popen[bytes], frame: bytes, timeout: float) -> Checked | str:
    """The answer to `frame` (an empty one is not sent), or why there is none. It may end the process for that."""
    assert process.stdin is not None
    assert process.stdout is not None
    late = threading.Event()

    def end() -> None:
        late.set()
        process.kill()

    timer = threading.Timer(timeout, end)
    timer.daemon = True
    timer.start()
    try:
        if frame:
            write_frame(process.stdin, frame)
        answer = read_frame(process.stdout)
    except (OSError, ValueError):  # the pipe broke, or was closed by another thread
        answer = None
    finally:
        timer.cancel()
    if late.is_set():  # also where the answer came a moment before the end
        return f"took longer than {timeout:g} s (--grammar-timeout)"
    if answer is not None:
        return msgspec.msgpack.decode(answer, type=Checked)
    return "took more memory than it may, or broke the compiler"


def _size(key: tuple[str, str], checked: Checked) -> int:
    return len(key[1]) + len(checked.lark) + len(checked.error)
