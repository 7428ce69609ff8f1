"""The scheduler's process: the loop that keeps the device busy.

With lag 1 the loop launches step N+1 before it looks at the results of step N; with lag 0 it waits first.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from typing import Any

import zmq

from gapless.overlap.device import CPUDevice, Launch, Worker
from gapless.runtime.core.child import ChildSpec, run_child
from gapless.runtime.core.config import ServerConfig
from gapless.runtime.core.errors import ConfigError, InternalError, ModelLoadError
from gapless.runtime.core.ipc import DETOKENIZER, SCHEDULER, Receiver, Sender
from gapless.runtime.core.messages import Fatal, Heartbeat, Ready, ToScheduler
from gapless.runtime.core.plan import DeviceInfo
from gapless.runtime.scheduler.scheduler import Scheduler

HEARTBEAT_S = 0.25
log = logging.getLogger("gapless.scheduler")


class Loop:
    """Ties the scheduler to its device and its two sockets."""

    def __init__(
        self,
        config: ServerConfig,
        device: CPUDevice,
        info: DeviceInfo,
        inbox: Receiver[ToScheduler],
        outbox: Sender,
    ) -> None:
        self.scheduler = Scheduler(config, info)
        self._device, self._inbox, self._outbox = device, inbox, outbox
        self._lag = 0 if config.disable_overlap_schedule else 1
        self._watchdog_s = config.watchdog_timeout
        self._flying: deque[Launch] = deque()
        self._last_beat = 0.0
        self._launches = 0

    def run(self) -> None:
        """Never returns; raises InternalError when the device failed."""
        while True:
            self.turn()

    def turn(self) -> None:
        """One pass: receive, compose and launch, retire, send."""
        if not self._flying and self.scheduler.is_idle:
            self._inbox.wait(int(HEARTBEAT_S * 1000))
        self.scheduler.handle(self._inbox.drain())
        plan = self.scheduler.compose()
        if plan is not None:
            self._flying.append(self._device.launch(plan))
            self._launches += 1
        if self._flying and (plan is None or len(self._flying) > self._lag):
            self._retire(self._flying.popleft())
        output = self.scheduler.take_output()
        if output is not None:
            self._outbox.send(output)
        self._beat()

    def _retire(self, launch: Launch) -> None:
        while not launch.wait(HEARTBEAT_S):
            age = time.monotonic() - launch.launched_at
            if age > self._watchdog_s:
                raise InternalError(
                    f"device step {launch.plan.step} has hung for {age:.0f} s (--watchdog-timeout)"
                )
            self._beat(age)
        self.scheduler.retire(launch.plan, launch.ids())

    def _beat(self, launch_age: float = 0.0) -> None:
        now = time.monotonic()
        if now - self._last_beat < HEARTBEAT_S:
            return
        self._last_beat = now
        running, waiting, used = self.scheduler.counts
        self._outbox.send(Heartbeat(now, launch_age, running, waiting, used, self._launches))


def make_worker(config: ServerConfig) -> Worker:
    """Called on the device thread, which is the only one to import torch."""
    if config.model_path == "toy":
        from gapless.overlap.toy_worker import ToyWorker

        return ToyWorker(config)
    from gapless.overlap.torch_worker import TorchWorker

    return TorchWorker(config)


def ready_message(config: ServerConfig, info: DeviceInfo, scheduler: Scheduler) -> Ready:
    facts: dict[str, Any] = {
        "device": info.description,
        "dtype": info.dtype,
        "architecture": info.architecture,
        "attention_backend": info.attention_backend,
        "page_size": config.page_size,
    }
    return Ready(
        vocab_size=info.vocab_size,
        context_length=info.context_length,
        max_total_tokens=scheduler.pool_tokens,
        max_prompt_tokens=scheduler.max_prompt_tokens,
        eos_token_ids=info.eos_token_ids,
        load_seconds=info.load_seconds,
        info=facts,
    )


def main(spec: ChildSpec) -> int:
    context: zmq.Context[Any] = zmq.Context()
    inbox: Receiver[ToScheduler] = Receiver(context, spec.directory, SCHEDULER)
    outbox = Sender(context, spec.directory, DETOKENIZER)
    config = spec.config
    device = CPUDevice(lambda: make_worker(config))
    try:
        info = device.start()
        log.info("device: %s", info.description)
        loop = Loop(config, device, info, inbox, outbox)
        outbox.send(ready_message(config, info, loop.scheduler))
        loop.run()
    except (ConfigError, ModelLoadError) as error:
        outbox.send(Fatal(error.message))
        raise
    except Exception as error:
        outbox.send(Fatal(f"the engine failed: {error}"))
        raise
    finally:
        context.destroy(linger=1000)  # ms that the last message has to get out
    return 0


if __name__ == "__main__":
    run_child(main)
