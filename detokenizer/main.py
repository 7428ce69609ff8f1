"""The detokenizer's process: `python -m gapless.detokenizer.main`, started by the launcher."""

from __future__ import annotations

import zmq

from gapless.detokenizer.manager import DetokenizerManager
from gapless.runtime.core.child import ChildSpec, run_child
from gapless.runtime.core.ipc import DETOKENIZER, FRONT, SCHEDULER, Receiver, Sender
from gapless.runtime.core.messages import StepOutput, ToDetokenizer
from gapless.runtime.tokenizer.load import load_pieces

_FOREVER = -1


def main(spec: ChildSpec) -> int:
    """Runs until the parent closes stdin: after a Fatal, too, since the front may still want its answer."""
    context = zmq.Context()
    receiver: Receiver[ToDetokenizer] = Receiver(context, spec.directory, DETOKENIZER)
    front = Sender(context, spec.directory, FRONT)
    scheduler = Sender(context, spec.directory, SCHEDULER)
    manager = DetokenizerManager(load_pieces(spec.config.model_path))
    while True:
        receiver.wait(_FOREVER)
        for message in receiver.drain():
            if not isinstance(
                message, StepOutput
            ):  # a heartbeat, an answer to a flush, the scheduler's start or end
                front.send(message)
                continue
            output, stops = manager.handle(message)
            for stop in stops:
                scheduler.send(stop)
            if output.uids or output.finished or output.opened or output.logprobs:
                front.send(output)


if __name__ == "__main__":
    run_child(main)
