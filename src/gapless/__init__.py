"""Gapless: a serving runtime for language models in which the device never waits for the CPU.

The public names load on first use, so that `import gapless` costs nothing and imports no torch.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gapless.runtime.core.sampling import SamplingParams as SamplingParams
    from gapless.runtime.engine import Engine as Engine

__version__ = "0.1.0"
__all__ = ["Engine", "SamplingParams", "__version__"]

_LAZY = {"Engine": "gapless.runtime.engine", "SamplingParams": "gapless.runtime.core.sampling"}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'gapless' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_LAZY[name]), name)
