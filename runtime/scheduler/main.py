"""The scheduler's process: `python -m gapless.runtime.scheduler.main`, started by the launcher or an engine."""

from __future__ import annotations

import gc
import logging
from pathlib import Path
from typing import Any

import zmq

from gapless.overlap.cuda import cuda_device
from gapless.overlap.device import CPUDevice, Device, Worker
from gapless.overlap.simulated import simulated_device
from gapless.runtime.core.child import ChildSpec, run_child
from gapless.runtime.core.config import ServerConfig
from gapless.runtime.core.errors import ConfigError, ModelLoadError
from gapless.runtime.core.ipc import DETOKENIZER, SCHEDULER, Receiver, Sender
from gapless.runtime.core.messages import Fatal, Ready, ToScheduler
from gapless.runtime.core.plan import DeviceInfo
from gapless.runtime.core.trace import Recorder, Trace
from gapless.runtime.scheduler.grammar import unconstrained
from gapless.runtime.scheduler.grammar_matcher import Grammars, load_in_background
from gapless.runtime.scheduler.loop import Inbox, Loop, Outbox
from gapless.runtime.scheduler.scheduler import Scheduler

log = logging.getLogger("gapless.scheduler")


def make_worker(config: ServerConfig) -> Worker:
    """Called on the device thread, which is the only one to import torch."""
    if config.model_path == "toy":
        from gapless.overlap.toy_worker import ToyWorker

        return ToyWorker(config)
    from gapless.overlap.torch_worker import TorchWorker

    return TorchWorker(config)


def make_device(config: ServerConfig) -> Device:
    if config.device == "sim":
        return simulated_device(config)
    if config.device == "cuda":
        return cuda_device(config)
    return CPUDevice(lambda: make_worker(config))


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
        hidden_size=info.hidden_size,
    )


def loop_with(
    config: ServerConfig,
    scheduler: Scheduler,
    device: Device,
    inbox: Inbox,
    outbox: Outbox,
    recorder: Recorder | None = None,
) -> Loop:
    """The loop as the options ask for it."""
    return Loop(
        scheduler,
        device,
        inbox,
        outbox,
        lag=0 if config.disable_overlap_schedule else 1,
        steps=config.num_scheduler_steps,
        watchdog_s=config.watchdog_timeout,
        recorder=recorder,
    )


def main(spec: ChildSpec) -> int:
    context: zmq.Context[Any] = zmq.Context()
    inbox: Receiver[ToScheduler] = Receiver(context, spec.directory, SCHEDULER)
    outbox = Sender(context, spec.directory, DETOKENIZER)
    config = spec.config
    try:
        device = make_device(config)
        loading = load_in_background(config.model_path) if config.grammar_backend != "none" else None
        trace = Trace(Path(config.trace)) if config.trace else None
        info = device.start()
        log.info("device: %s", info.description)
        make_grammar = Grammars(loading.result(), info.vocab_size).make if loading else unconstrained
        scheduler = Scheduler(config, info, make_grammar)
        outbox.send(ready_message(config, info, scheduler))
        gc.collect()
        gc.freeze()  # what loading made stays: the collector need not look at it again
        loop_with(config, scheduler, device, inbox, outbox, trace).run()
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
