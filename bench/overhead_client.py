"""The other end of `gapless bench overhead`: a process that sends the requests and decodes what comes back.

It keeps a fixed number of requests alive: whatever ends is replaced at once. Its task is one line of JSON on standard
input, whose end ends it.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import zmq

from gapless.runtime.core.ipc import DETOKENIZER, SCHEDULER, Receiver, Sender
from gapless.runtime.core.messages import StepOutput, Submit, ToDetokenizer, column, int32s, uint8s
from gapless.runtime.core.sampling import SamplingParams


@dataclass(frozen=True)
class Task:
    """What the client does; lengths in tokens."""

    directory: str  # of the sockets
    alive: int
    input_len: int
    output_len: int  # mean of a geometric distribution; 0: as long as possible
    max_output: int
    vocab_size: int
    seed: int


class Requests:
    """Random prompts and lengths. A geometric length has no memory, so the first step is as busy as any later one."""

    def __init__(self, task: Task) -> None:
        self._task, self._random, self._sent = task, np.random.default_rng(task.seed), 0

    def next(self) -> Submit:
        task = self._task
        self._sent += 1
        length = task.max_output
        if task.output_len:
            length = min(int(self._random.geometric(1 / task.output_len)), length)
        prompt = self._random.integers(0, task.vocab_size, task.input_len)
        params = SamplingParams(max_new_tokens=length, temperature=0.0, ignore_eos=True)
        return Submit(self._sent, column(prompt, "<i4"), params, (), seed=self._sent)


def main() -> None:
    task = Task(**json.loads(sys.stdin.buffer.readline()))
    threading.Thread(target=_end_with_input, daemon=True).start()
    context: zmq.Context[Any] = zmq.Context()
    inbox: Receiver[ToDetokenizer] = Receiver(context, Path(task.directory), DETOKENIZER)
    outbox = Sender(context, Path(task.directory), SCHEDULER)
    requests = Requests(task)
    missing = task.alive
    while True:
        for _ in range(missing):
            outbox.send(requests.next())
        inbox.wait(1000)
        missing = sum(_ended(message) for message in inbox.drain())


def _ended(message: ToDetokenizer) -> int:
    """Takes a message in; how many requests end with it."""
    if not isinstance(message, StepOutput):
        return 0
    columns = int32s(message.slots), int32s(message.generations), int32s(message.ids), uint8s(message.finish)
    assert len({len(values) for values in columns}) == 1, "columns of unequal length"
    if message.closed:
        sys.exit(f"a request was refused: {message.closed[0].message}")
    return int(np.count_nonzero(columns[-1]))


def _end_with_input() -> None:
    sys.stdin.buffer.read()
    os._exit(0)


if __name__ == "__main__":
    main()
