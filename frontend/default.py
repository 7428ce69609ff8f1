"""The backend of the programs that are run without one."""

from __future__ import annotations

from typing import Any

from gapless.frontend.backends.base import Backend

_default: Backend | None = None


def set_default_backend(backend: Any) -> None:
    """For all programs from now on: an `Engine`, `RuntimeEndpoint(url)` or `OpenAI(model)`; None takes it back."""
    global _default
    _default = None if backend is None else _wrapped(backend)


def backend_or_default(backend: Any) -> Backend:
    """Raises RuntimeError where there is neither."""
    if backend is not None:
        return _wrapped(backend)
    if _default is None:
        raise RuntimeError(
            "no backend: call gapless.set_default_backend(...) with an Engine or a RuntimeEndpoint(url) first, "
            "or give run() its backend="
        )
    return _default


def _wrapped(backend: Any) -> Backend:
    from gapless.frontend.backends.wrap import as_backend

    return as_backend(backend)
