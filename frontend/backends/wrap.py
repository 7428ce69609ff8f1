"""A backend from whatever a program is given as one."""

from __future__ import annotations

from typing import cast

from gapless.frontend.backends.base import Backend
from gapless.frontend.backends.endpoint import RuntimeEndpoint

_METHODS = ("generate", "stream", "select", "commit", "release", "role_text", "close")


def as_backend(given: object) -> Backend:
    """A Backend as it is, a `gapless.Engine`, or the URL of a server; TypeError or ValueError for anything else."""
    if isinstance(given, str):
        return RuntimeEndpoint(given)
    if all(hasattr(given, name) for name in _METHODS):
        return cast(Backend, given)
    from gapless import Engine
    from gapless.frontend.backends.engine import EngineBackend

    if isinstance(given, Engine):
        return EngineBackend(given)
    raise TypeError(f"a backend is a gapless.Engine, a Backend or a server's URL, not {type(given).__name__}")
