"""`@function`: programs, and the ways to run them."""

from __future__ import annotations

import asyncio
import concurrent.futures
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar, overload

from gapless.frontend.backends.base import Backend
from gapless.frontend.batch import Batch
from gapless.frontend.branch import Branch
from gapless.frontend.default import backend_or_default
from gapless.frontend.expressions import SAMPLING, sampling
from gapless.frontend.job import Job
from gapless.frontend.loop import the_loop
from gapless.frontend.progress import ProgressBar
from gapless.frontend.run import Run
from gapless.frontend.state import ProgramState
from gapless.frontend.trace import Trace, TracedBranch

T = TypeVar("T")
AUTO_IN_FLIGHT = 10_000  # each costs some kB here and no thread; the backend queues what cannot run
_IGNORED = {"use_thread"}  # SGLang's: nothing here runs in a thread of its own


class Function:
    """A program: a function, plain or `async def`, whose first parameter is its state.

    Plain programs share one thread and hand it on where they wait for the model; one that waits for something else, a
    web search for instance, holds the others up meanwhile and should be an `async def`.
    """

    def __init__(self, function: Callable[..., Any], bound: Mapping[str, Any] | None = None) -> None:
        self._function = function
        self._bound = dict(bound or {})
        self._signature = inspect.signature(function)
        self._name = f"program {getattr(function, '__name__', function)!r}"
        if not self._signature.parameters:
            raise TypeError(f"{self._name} needs a first parameter, its state")
        if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
            raise TypeError(f"{self._name} must not yield: its function is called once")
        functools.update_wrapper(self, function)

    def bind(self, **kwargs: Any) -> Function:
        """The same program with these arguments, which a call may still override."""
        if unknown := kwargs.keys() - self._signature.parameters.keys():
            raise TypeError(f"{self._name} has no parameter {min(unknown)!r}")
        return Function(self._function, {**self._bound, **kwargs})

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """With a state as the first argument: as a part of that state's program. Else as `run`."""
        if args and isinstance(args[0], ProgramState):
            return self._function(*args, **{**self._bound, **kwargs})
        return self.run(*args, **kwargs)

    def run(self, *args: Any, backend: Any = None, stream: bool = False, **kwargs: Any) -> ProgramState:
        """Runs it to its end, or with `stream=True` just starts it, and gives its state.

        `kwargs` are the function's arguments and, by the names of `gen`, the sampling parameters of those calls that
        have none of their own. Raises TypeError for wrong arguments, and ProgramError where the program or a call of
        it failed and the program did not handle it; with `stream`, where that is read.
        """
        job = self._single(args, kwargs, backend, stream)
        if stream:
            the_loop().submit(job.run())
        else:
            the_loop().wait(job.run())
            job.branch.run.raise_error()
        return job.state

    async def run_async(self, *args: Any, backend: Any = None, **kwargs: Any) -> ProgramState:
        """`run`, for a coroutine of any event loop; cancelling it cancels the program's calls."""
        job = self._single(args, kwargs, backend)
        await the_loop().reach(job.run())
        job.branch.run.raise_error()
        return job.state

    def run_batch(
        self,
        batch_kwargs: Sequence[Mapping[str, Any] | Sequence[Any]],
        *,
        backend: Any = None,
        num_threads: int | str = "auto",
        progress_bar: bool = False,
        generator_style: bool = False,
        **params: Any,
    ) -> Any:
        """Runs it for each item, a dict of its arguments or a list of them in order; the states are in items' order.

        A program that fails has its error in `state.error()`, and reading its state raises it. `num_threads` is how
        many programs may be in flight, in one thread: "auto" means 10,000. With `generator_style` it is an iterator
        whose states come as they are ready. `params` are the sampling parameters, as for `run`.
        """
        defaults = sampling({name: value for name, value in params.items() if name not in _IGNORED})
        calls = [self._item(place, item) for place, item in enumerate(batch_kwargs)]
        in_flight = AUTO_IN_FLIGHT if num_threads == "auto" else num_threads
        if not isinstance(in_flight, int) or in_flight < 1:
            raise ValueError(f'num_threads must be "auto" or at least 1, got {num_threads!r}')
        target = backend_or_default(backend)
        jobs = (self._job(*call, defaults, target) for call in calls)
        bar = ProgressBar(len(calls)) if progress_bar and calls else None
        batch = Batch(Run(f"a batch of {self._name}", target), jobs, len(calls), in_flight, bar)
        if generator_style:
            return _in_order(batch, len(calls))
        return the_loop().wait(batch.states()) if calls else []

    def trace(self, *args: Any, backend: Any = None, **kwargs: Any) -> Trace:
        """What it appends, as a tree that prints: its function is called, but no model.

        Values of the model, and arguments that are not given, are stand-ins such as "{answer}". Where the function can
        do nothing with one, the tree ends there and has the error.
        """
        names = list(self._signature.parameters.values())[1 + len(args) :]
        missing = {
            p.name: f"{{{p.name}}}"
            for p in names
            if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD
        }
        arguments, own, _ = self._split(args, {**missing, **self._bound, **kwargs})
        branch = TracedBranch(Run(self._name, None))
        job = Job(self._function, branch, arguments, own)
        branch.open()
        the_loop().wait(job.run())
        return Trace(self._name, branch, branch.run.error)

    def _single(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], backend: Any, stream: bool = False
    ) -> Job:
        job = self._job(*self._split(args, kwargs), backend_or_default(backend), stream)
        job.branch.open()
        return job

    def _job(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        defaults: Mapping[str, Any],
        backend: Backend,
        stream: bool = False,
    ) -> Job:
        return Job(self._function, Branch(Run(self._name, backend, defaults, stream)), args, kwargs)

    def _split(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any], dict[str, Any]]:
        """The function's arguments and the sampling parameters; a name that is both is the function's."""
        parameters = self._signature.parameters
        params = {n: v for n, v in kwargs.items() if n in SAMPLING and n not in parameters}
        own = {n: v for n, v in kwargs.items() if n not in params and (n in parameters or n not in _IGNORED)}
        return args, self._checked(args, own), sampling(params)

    def _item(self, place: int, item: object) -> tuple[tuple[Any, ...], dict[str, Any]]:
        try:
            if isinstance(item, Mapping):
                return (), self._checked((), item)
            if isinstance(item, (list, tuple)):
                return tuple(item), self._checked(tuple(item), {})
            raise TypeError(f"an item is a dict or a list of arguments, not {type(item).__name__}")
        except TypeError as error:
            raise TypeError(f"item {place} of the batch: {error}") from None

    def _checked(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """The keyword arguments with those bound before."""
        merged = {**self._bound, **kwargs}
        try:
            self._signature.bind(None, *args, **merged)
        except TypeError as error:
            raise TypeError(f"{self._name}: {error}") from None
        return merged


def _in_order(batch: Batch, count: int) -> Iterator[ProgramState]:
    running = the_loop().submit(batch.run())
    try:
        for place in range(count):
            state = the_loop().wait(batch.result(place))
            if state is None:
                break
            yield state
        the_loop().wait(_result(running))
    finally:
        running.cancel()


async def _result(future: concurrent.futures.Future[T]) -> T:
    return await asyncio.wrap_future(future)


@overload
def function(function: Callable[..., Any], num_api_spec_tokens: int | None = None) -> Function: ...


@overload
def function(
    function: None = None, num_api_spec_tokens: int | None = None
) -> Callable[[Callable[..., Any]], Function]: ...


def function(
    function: Callable[..., Any] | None = None, num_api_spec_tokens: int | None = None
) -> Function | Callable[[Callable[..., Any]], Function]:
    """Makes a program of a function whose first parameter is the program's state: `@function`.

    `num_api_spec_tokens` is accepted and ignored: it is about SGLang's speculative calls of paid endpoints.
    """
    return Function if function is None else Function(function)
