"""The scheduler's loop and its device in this process, without sockets: ids in, ids out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gapless.overlap.device import Device
from gapless.runtime.core.config import ServerConfig
from gapless.runtime.core.messages import (
    Finish,
    StepOutput,
    Submit,
    ToDetokenizer,
    ToScheduler,
    column,
    int32s,
)
from gapless.runtime.core.sampling import SamplingParams
from gapless.runtime.core.trace import Recorder
from gapless.runtime.scheduler.grammar import MakeGrammar, unconstrained
from gapless.runtime.scheduler.main import loop_with
from gapless.runtime.scheduler.scheduler import Scheduler


class InProcess:
    """Starts `device`, which is stopped at the end of a `with` block; `info` is what it says of itself."""

    def __init__(
        self,
        config: ServerConfig,
        device: Device,
        make_grammar: MakeGrammar = unconstrained,
        recorder: Recorder | None = None,
    ) -> None:
        self._device = device
        self.info = device.start()
        self.scheduler = Scheduler(config, self.info, make_grammar)
        self.loop = loop_with(config, self.scheduler, device, self, self, recorder)
        self._pending: list[ToScheduler] = []
        self._outputs: list[StepOutput] = []
        self._count = 0

    def __enter__(self) -> InProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self._device.stop()

    def generate(
        self, prompts: Sequence[Sequence[int]], params: Sequence[Mapping[str, Any]]
    ) -> list[list[int]]:
        """The output ids of each prompt; EOS does not end them. Request i has uid and seed i."""
        self.submit(prompts, params)
        return self.finish()

    def submit(self, prompts: Sequence[Sequence[int]], params: Sequence[Mapping[str, Any]]) -> None:
        """Sends all at once; call `loop.turn` for each step, or `finish`. Nothing else may be running."""
        self._outputs.clear()
        self._count = len(prompts)
        for uid, (prompt, fields) in enumerate(zip(prompts, params, strict=True)):
            sampling = SamplingParams.parse(dict(fields))
            self._pending.append(Submit(uid, column(prompt, "<i4"), sampling, (), seed=uid))

    def finish(self) -> list[list[int]]:
        """Turns until all requests have ended; their output ids in the order in which they were sent."""
        while self._pending or not self.scheduler.is_idle:
            self.loop.turn()
        return self._collected()

    def wait(self, timeout_ms: int) -> bool:
        return bool(self._pending)

    def drain(self) -> list[ToScheduler]:
        pending, self._pending = self._pending, []
        return pending

    def send(self, message: ToDetokenizer) -> None:
        if isinstance(message, StepOutput):
            self._outputs.append(message)

    def _collected(self) -> list[list[int]]:
        """Read after the run: nothing here takes time while the loop turns."""
        ids: list[list[int]] = [[] for _ in range(self._count)]
        uids: dict[tuple[int, int], int] = {}
        for output in self._outputs:
            uids |= {(opened.slot, opened.generation): opened.uid for opened in output.opened}
            rows = (int32s(column).tolist() for column in (output.slots, output.generations, output.ids))
            for slot, generation, token in zip(*rows, strict=True):
                ids[uids[slot, generation]].append(token)
            for closed in output.closed:
                assert closed.finish != Finish.FAILED, closed.message
        return ids
