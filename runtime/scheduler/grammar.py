"""What constrains a request's output: a state that gives a mask for the next token and moves on with each token."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from gapless.runtime.core.messages import Submit
from gapless.runtime.core.plan import I32


class GrammarComplete(Exception):
    """The output matches, and nothing may follow."""


class Grammar(Protocol):
    """Either method may raise; that ends its request alone."""

    def mask(self, wait_s: float) -> I32 | None:
        """[words of 32 ids]: bit v % 32 of word v // 32 is set where id v may come next. At least one is.

        None while it is not there, and has not come within `wait_s` seconds; the row sits the step out. Raises
        GrammarComplete where the request has ended.
        """
        ...

    def accept(self, token: int) -> None:
        """The next token was decided."""
        ...


MakeGrammar = Callable[[Submit], Grammar | None]


def unconstrained(_: Submit) -> Grammar | None:
    """For a server without structured output."""
    return None
