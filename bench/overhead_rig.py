"""The scheduler's real loop and sockets on a simulated device, with a client in a process of its own."""

from __future__ import annotations

import dataclasses
import json
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import zmq

from gapless.bench.overhead_client import Task
from gapless.bench.overhead_meter import Meter, MeteredClock, Sample, Window
from gapless.overlap.simulated import ConstantWorker, SimulatedDevice
from gapless.runtime.core.config import ServerConfig
from gapless.runtime.core.errors import InternalError
from gapless.runtime.core.ipc import DETOKENIZER, SCHEDULER, Receiver, Sender, private_directory
from gapless.runtime.core.messages import StepOutput, ToDetokenizer, ToScheduler
from gapless.runtime.core.plan import DeviceInfo, Plan
from gapless.runtime.core.trace import Recorder
from gapless.runtime.scheduler.loop import Outbox
from gapless.runtime.scheduler.main import loop_with
from gapless.runtime.scheduler.scheduler import Scheduler

INPUT_LEN, VOCABULARY = 128, 32_000
PREFILL_TOKENS = 1024  # of a step, beside one token for each running request
WARM_UP_STEPS = 64
ENDLESS = 2048  # more than the steps until all requests run
LONGEST_OUTPUT = 10  # times the mean; one in e^10 would be longer
MOST_PROBES, PROBE_STEPS, PROBE_WINDOWS = 20, 300, 3
HIDDEN_IDLE, LONGEST_S = 0.02, 20e-3
PATIENCE_S = 30.0


@dataclass(frozen=True)
class Case:
    """One line of the report. `output_len` is the mean, 0: endless. `cost` gives a step's seconds."""

    batch: int
    lag: int
    steps: int
    streaming: bool
    output_len: int
    num_steps: int
    seed: int
    cost: Callable[[Plan], float]


class EndsOnly:
    """Passes on only those steps in which a request begins or ends: what an engine would send that does not stream."""

    def __init__(self, outbox: Outbox) -> None:
        self._outbox = outbox

    def send(self, message: ToDetokenizer) -> None:
        if not isinstance(message, StepOutput) or message.opened or message.closed or any(message.finish):
            self._outbox.send(message)


class Rig:
    """A context manager; enter it before measuring."""

    def __init__(self, case: Case, trace: Recorder | None = None) -> None:
        self.case, self.cost = case, case.cost
        steps = 2 * case.num_steps + (0 if case.lag == 0 else MOST_PROBES * PROBE_WINDOWS * PROBE_STEPS)
        endless = ENDLESS + steps
        self._max_output = LONGEST_OUTPUT * case.output_len or endless
        self._config = _config(case, INPUT_LEN + self._max_output)
        self._meter = Meter(None)
        self._trace = trace

    def __enter__(self) -> Rig:
        config = self._config
        self._directory = private_directory()
        self._context: zmq.Context[Any] = zmq.Context()
        self._inbox: Receiver[ToScheduler] = Receiver(self._context, self._directory, SCHEDULER)
        outbox = Sender(self._context, self._directory, DETOKENIZER)
        self.device = SimulatedDevice(
            ConstantWorker(_info(config)),
            lambda plan: self.cost(plan),
            MeteredClock(self._meter),
            "simulated",
        )
        self._scheduler = Scheduler(config, self.device.start())
        self._loop = loop_with(
            config,
            self._scheduler,
            self.device,
            self._inbox,
            outbox if self.case.streaming else EndsOnly(outbox),
            self._meter,
        )
        self._client = _start_client(self._task())
        return self

    def __exit__(self, *_: object) -> None:
        self._client.kill()
        self._client.wait()
        cast(Any, self._client.stdin).close()
        self._context.destroy(linger=0)
        shutil.rmtree(self._directory)

    def warm_up(self) -> None:
        """Returns when all requests run."""
        deadline = time.monotonic() + PATIENCE_S
        while self._scheduler.batch.running.size < self.case.batch:
            self._loop.turn()
            if self._client.poll() is not None or time.monotonic() > deadline:
                raise InternalError("bench overhead: the client's requests did not arrive")
        self._advance(WARM_UP_STEPS)

    def measure(self) -> Window:
        """The case's own window, which the trace hears of; host and CPU are those of steps without a recorder.

        A recorder looks at the clock seven times a step, which is a tenth of a short step's host time.
        """
        self._meter.trace = self._trace
        window = self._window(self.case.num_steps)
        self._meter.trace = None
        plain = self._samples_without_phases(len(window.samples))
        samples = [
            Sample(alone.host, alone.cpu, told.phases)
            for alone, told in zip(plain, window.samples, strict=True)
        ]
        return dataclasses.replace(window, samples=samples)

    def _samples_without_phases(self, count: int) -> list[Sample]:
        meter, loop = self._meter, self._loop
        recorder, loop.recorder, meter.samples = loop.recorder, None, []
        while len(meter.samples) < count:
            loop.turn()
        loop.recorder = recorder
        return meter.samples[:count]

    def min_step_hidden(self, host: float) -> float | None:
        """The shortest device step, in seconds, at which the idle share stays within 2 %; None above 20 ms.

        The search begins at half of `host`, which is too short, and ends between two steps that are 1 % apart.
        """
        high = host / 2
        while not self._hidden(high):
            if high >= LONGEST_S:
                return None
            high = min(1.5 * high, LONGEST_S)
        low = high / 1.5
        while high / low > 1.01:
            middle = (low * high) ** 0.5
            low, high = (low, middle) if self._hidden(middle) else (middle, high)
        return high

    def _hidden(self, seconds: float) -> bool:
        self.cost = lambda _: seconds
        self._advance(2 * self.case.steps)
        shares = [self._window(PROBE_STEPS).idle_share for _ in range(PROBE_WINDOWS)]
        return statistics.median(shares) <= HIDDEN_IDLE

    def _window(self, count: int) -> Window:
        meter, device = self._meter, self.device
        meter.samples = []
        steps, without_work = meter.steps, meter.without_work
        busy, idle, finished = device.busy, device.idle, self._finished()
        self._advance(count)
        return Window(
            samples=meter.samples,
            steps=meter.steps - steps,
            busy=device.busy - busy,
            idle=max(0.0, device.idle - idle - (meter.without_work - without_work)),
            finished=self._finished() - finished,
        )

    def _advance(self, count: int) -> None:
        end = self._meter.steps + count
        while self._meter.steps < end:
            self._loop.turn()

    def _finished(self) -> int:
        """Requests that gave back their slots so far."""
        return int(self._scheduler.batch.rows.generation.sum())

    def _task(self) -> Task:
        case = self.case
        # Enough wait in line that there is always one for a slot that is free.
        line = 4 + 8 * case.batch // case.output_len if case.output_len else 0
        return Task(
            directory=str(self._directory),
            alive=case.batch + line,
            input_len=INPUT_LEN,
            output_len=case.output_len,
            max_output=self._max_output,
            vocab_size=VOCABULARY,
            seed=case.seed,
        )


def _config(case: Case, context: int) -> ServerConfig:
    """As a server's, with a pool in which nobody is preempted."""
    page = ServerConfig.page_size
    return ServerConfig(
        model_path="toy",
        device="sim",
        disable_overlap_schedule=case.lag == 0,
        num_scheduler_steps=case.steps,
        context_length=context,
        max_total_tokens=(case.batch + 1) * (context + page),
        max_running_requests=case.batch,
        max_num_batched_tokens=case.batch + PREFILL_TOKENS,
    )


def _info(config: ServerConfig) -> DeviceInfo:
    return DeviceInfo(
        description="",
        dtype="",
        vocab_size=VOCABULARY,
        context_length=config.context_length,
        eos_token_ids=(),
        pages=config.max_total_tokens // config.page_size,
        load_seconds=0.0,
        attention_backend="",
        architecture="",
    )


def _start_client(task: Task) -> subprocess.Popen[bytes]:
    client = subprocess.Popen(
        [sys.executable, "-P", "-m", "gapless.bench.overhead_client"], stdin=subprocess.PIPE
    )
    assert client.stdin is not None
    client.stdin.write(json.dumps(dataclasses.asdict(task)).encode() + b"\n")
    client.stdin.flush()
    return client
