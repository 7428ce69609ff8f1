"""The HTTP process: `python -m gapless.tokenizer_manager.main`, started by the launcher.

It serves on a socket that the launcher has bound, from the first moment: /health says 503 until the model is there.
"""

from __future__ import annotations

import asyncio
import resource
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn
import uvloop
import zmq

from gapless.runtime.core.child import ChildSpec, run_child
from gapless.runtime.core.errors import InternalError, UnavailableError
from gapless.runtime.core.ipc import FRONT, SCHEDULER, Receiver, Sender
from gapless.runtime.core.messages import ToFront
from gapless.runtime.tokenizer.load import load_tokenizer
from gapless.tokenizer_manager.app import create_app
from gapless.tokenizer_manager.connection import Connection
from gapless.tokenizer_manager.front import Front

_FLUSH_SECONDS = 0.5  # for what has been written to reach the clients
_KEEP_ALIVE_SECONDS = 120  # longer than routers and clients keep idle connections, so that they close first


class HttpServer(uvicorn.Server):
    """uvicorn on a given socket, with signals left alone."""

    def __init__(self, front: Front) -> None:
        super().__init__(
            uvicorn.Config(
                create_app(front),
                http=Connection,
                ws="none",
                lifespan="off",
                log_config=None,
                log_level="warning",
                access_log=False,
                server_header=False,
                proxy_headers=False,
                timeout_keep_alive=_KEEP_ALIVE_SECONDS,
            )
        )

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def main(spec: ChildSpec) -> int:
    """Serves until SIGTERM, then finishes what is open.

    Further SIGTERMs change nothing: a supervisor may send one to every process beside the launcher's own. It is the
    launcher that cuts a drain short.

    Raises ModelLoadError where the tokenizer cannot be loaded. The loop is left open: `run_child` exits at once.
    """
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # a connection takes a descriptor
    return uvloop.new_event_loop().run_until_complete(_serve(spec))


async def _serve(spec: ChildSpec) -> int:
    assert spec.listen_fd is not None
    context = zmq.Context()
    receiver: Receiver[ToFront] = Receiver(context, spec.directory, FRONT)
    front = Front(spec.config, Sender(context, spec.directory, SCHEDULER).send)
    receiver.read_on_loop(asyncio.get_running_loop(), front.handle)
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    server = HttpServer(front)
    serving = asyncio.create_task(server.serve([socket.socket(fileno=spec.listen_fd)]))
    loading = asyncio.create_task(asyncio.to_thread(load_tokenizer, spec.config.model_path))
    stopping = asyncio.create_task(stop.wait())
    await asyncio.wait({serving, loading, stopping}, return_when=asyncio.FIRST_COMPLETED)
    if loading.done():
        front.set_tokenizer(loading.result())
        await asyncio.wait({serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
    if serving.done():
        serving.result()
        raise InternalError("the HTTP server ended by itself")
    await _drain(front, server, serving)
    return 0


async def _drain(front: Front, server: HttpServer, serving: asyncio.Task[None]) -> None:
    """Refuses new requests and lets open ones finish within the drain timeout."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + front.config.drain_timeout
    front.draining = True
    idle = asyncio.create_task(front.registry.idle.wait())
    await asyncio.wait({idle}, timeout=front.config.drain_timeout)
    # What has not finished in time ends with an error.
    front.fail_all(UnavailableError("the server is shutting down"))
    server.should_exit = True
    await asyncio.wait({serving}, timeout=max(deadline - loop.time(), _FLUSH_SECONDS))


if __name__ == "__main__":
    run_child(main)
