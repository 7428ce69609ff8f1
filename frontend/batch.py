"""Many runs of one program, so many of them in flight, with what they have in common computed first."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator, Sequence
from contextlib import suppress

from gapless.frontend.backends.base import BackendError
from gapless.frontend.branch import Branch
from gapless.frontend.expressions import Leaf
from gapless.frontend.job import Job
from gapless.frontend.loop import Signal
from gapless.frontend.progress import ProgressBar
from gapless.frontend.run import Run
from gapless.frontend.state import ProgramState

_LOOKED_AT = 64  # programs at the head of a batch; more would keep the model waiting for their functions
_WORTH_CHARS = 256  # a shorter prefix is computed sooner than a call of its own is answered


class Batch:
    """Belongs to the loop. Its jobs are made as they are started.

    The first programs run up to their first calls, which are held back: what they have said by then shows the prefix
    that they share, and no function runs twice.
    """

    def __init__(
        self, common: Run, jobs: Iterator[Job], count: int, in_flight: int, bar: ProgressBar | None
    ) -> None:
        """`common` is for the call that computes the shared prefix; `count` is the number of jobs."""
        self._common = common
        self._jobs = enumerate(jobs)
        self._opened = self._open_rest()
        self._in_flight = min(count, in_flight)
        self._bar = bar
        self._changed = Signal()
        self._over = False
        self._states: dict[int, ProgramState] = {}  # of the ended programs

    async def run(self) -> None:
        """All programs, to their ends. Cancelling it cancels those in flight."""
        try:
            async with asyncio.TaskGroup() as group:
                first = list(itertools.islice(self._jobs, min(self._in_flight, _LOOKED_AT)))
                for item in first:
                    group.create_task(self._work(itertools.chain([item], self._opened)))
                await asyncio.sleep(0)  # each of them runs until it waits
                await self._commit_common([job.branch for _, job in first])
                for _, job in first:
                    job.branch.open()
                for _ in range(self._in_flight - len(first)):
                    group.create_task(self._work(self._opened))
        finally:
            self._over = True
            self._changed.notify()
            await self._common.release()

    async def states(self) -> list[ProgramState]:
        await self.run()
        return [self._states[place] for place in range(len(self._states))]

    async def result(self, place: int) -> ProgramState | None:
        """The state of a program that has ended, which is forgotten here; None if the batch was ended before."""
        while not (place in self._states or self._over):
            await self._changed.wait()
        return self._states.pop(place, None)

    def _open_rest(self) -> Iterator[tuple[int, Job]]:
        for place, job in self._jobs:
            job.branch.open()
            yield place, job

    async def _work(self, jobs: Iterator[tuple[int, Job]]) -> None:
        for place, job in jobs:
            await job.run()
            self._states[place] = job.state
            if self._bar is not None:
                self._bar.advance(failed=job.branch.run.error is not None)
            self._changed.notify()

    async def _commit_common(self, branches: Sequence[Branch]) -> None:
        """Computes what the programs begin with. A backend that cannot do it will fail their own calls, too."""
        if len(branches) < 2:
            return
        shared = Branch(self._common)
        shared.open()
        for leaf in common_prefix([branch.leading() for branch in branches]):
            shared.append(leaf, ("", 0))
        await self._common.until(lambda: shared.settled)
        prompt = shared.prompt()
        if shared.failure is None and len(prompt.text) >= _WORTH_CHARS:
            with suppress(BackendError):
                await self._common.commit(prompt)


def common_prefix(programs: Sequence[Sequence[Leaf]]) -> list[Leaf]:
    """What all of them begin with: whole steps, and of the first that differ the text they share."""
    common: list[Leaf] = []
    for leaves in zip(*map(_merged, programs), strict=False):
        if all(leaf == leaves[0] for leaf in leaves):
            common.append(leaves[0])
            continue
        texts = [leaf for leaf in leaves if isinstance(leaf, str)]
        if len(texts) == len(leaves) and (shared := _common_text(texts)):
            common.append(shared)
        break
    return common


def _common_text(texts: Sequence[str]) -> str:
    first, last = min(texts), max(texts)  # of sorted ones, these two share the least
    same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(first, last, strict=False))
    return first[: sum(1 for _ in same)]


def _merged(leaves: Sequence[Leaf]) -> Iterator[Leaf]:
    """With neighbouring texts as one."""
    for is_text, group in itertools.groupby(leaves, lambda leaf: isinstance(leaf, str)):
        if is_text:
            yield "".join(str(leaf) for leaf in group)
        else:
            yield from group
