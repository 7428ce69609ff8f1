"""Gapless: a serving runtime for language models in which the device never waits for the CPU.

The public names load on first use, so that `import gapless` costs nothing and imports no torch.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gapless.frontend.backends.base import BackendError as BackendError
    from gapless.frontend.backends.endpoint import RuntimeEndpoint as RuntimeEndpoint
    from gapless.frontend.backends.openai import OpenAI as OpenAI
    from gapless.frontend.backends.select import greedy_token_selection as greedy_token_selection
    from gapless.frontend.backends.select import token_length_normalized as token_length_normalized
    from gapless.frontend.backends.select import (
        unconditional_likelihood_normalized as unconditional_likelihood_normalized,
    )
    from gapless.frontend.default import set_default_backend as set_default_backend
    from gapless.frontend.errors import ProgramError as ProgramError
    from gapless.frontend.errors import VariableError as VariableError
    from gapless.frontend.expressions import assistant as assistant
    from gapless.frontend.expressions import assistant_begin as assistant_begin
    from gapless.frontend.expressions import assistant_end as assistant_end
    from gapless.frontend.expressions import gen as gen
    from gapless.frontend.expressions import gen_int as gen_int
    from gapless.frontend.expressions import gen_string as gen_string
    from gapless.frontend.expressions import image as image
    from gapless.frontend.expressions import select as select
    from gapless.frontend.expressions import system as system
    from gapless.frontend.expressions import system_begin as system_begin
    from gapless.frontend.expressions import system_end as system_end
    from gapless.frontend.expressions import user as user
    from gapless.frontend.expressions import user_begin as user_begin
    from gapless.frontend.expressions import user_end as user_end
    from gapless.frontend.expressions import video as video
    from gapless.frontend.function import function as function
    from gapless.frontend.state import ProgramState as ProgramState
    from gapless.runtime.core.sampling import SamplingParams as SamplingParams
    from gapless.runtime.engine import Engine as Engine

__version__ = "0.1.0"

_LAZY = {
    name: f"gapless.{module}"
    for module, names in {
        "runtime.engine": "Engine",
        "runtime.core.sampling": "SamplingParams",
        "frontend.function": "function",
        "frontend.state": "ProgramState",
        "frontend.expressions": "gen gen_int gen_string select system user assistant system_begin system_end "
        "user_begin user_end assistant_begin assistant_end image video",
        "frontend.default": "set_default_backend",
        "frontend.errors": "ProgramError VariableError",
        "frontend.backends.base": "BackendError",
        "frontend.backends.select": "token_length_normalized greedy_token_selection "
        "unconditional_likelihood_normalized",
        "frontend.backends.endpoint": "RuntimeEndpoint",
        "frontend.backends.openai": "OpenAI",
    }.items()
    for name in names.split()
}
__all__ = ["__version__", *_LAZY]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'gapless' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_LAZY[name]), name)
