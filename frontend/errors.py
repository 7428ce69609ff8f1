"""What goes wrong in a program.

ProgramError            a call of a program failed, or its function raised; `__cause__` is the origin
└── VariableError       a variable that was never set; a KeyError, too
"""

from __future__ import annotations

import linecache
import sys
from pathlib import Path
from types import CodeType, TracebackType
from typing import Self

Site = tuple[str, int]  # file and line of a program
_HERE = str(Path(__file__).parent)


class ProgramError(Exception):
    """The message says which program, which line of it, and what happened there."""

    surfaced = False  # whether it was raised where somebody could handle it

    def again(self) -> Self:
        """Itself, to be raised: without the traces of the places where it was raised before."""
        self.surfaced = True
        return self.with_traceback(None)


class VariableError(ProgramError, KeyError):
    __str__ = Exception.__str__  # KeyError's shows the message's repr


def program_error(program: str, site: Site | None, cause: BaseException) -> ProgramError:
    """`cause`, told with its place; an error that tells its own is left as it is."""
    if isinstance(cause, ProgramError):
        return cause
    error = ProgramError(f"{program}{_place(site)}: {type(cause).__name__}: {cause}")
    error.__cause__ = cause
    return error


def unset(program: str, name: str, known: list[str]) -> VariableError:
    exist = ", ".join(map(repr, known)) if known else "none"
    return VariableError(f"{program}: the variable {name!r} was never set; those that exist: {exist}")


def call_site() -> Site:
    """The line outside of this package that called into it."""
    frame = sys._getframe(1)
    while frame.f_back is not None and _is_ours(frame.f_code):
        frame = frame.f_back
    return frame.f_code.co_filename, frame.f_lineno


def raising_site(trace: TracebackType | None, code: CodeType | None) -> Site | None:
    """The line of the function with this code that an exception passed through; else the first that is not ours."""
    sites: list[Site] = []
    while trace is not None:
        site = (trace.tb_frame.f_code.co_filename, trace.tb_lineno)
        if trace.tb_frame.f_code is code:
            return site
        if not _is_ours(trace.tb_frame.f_code):
            sites.append(site)
        trace = trace.tb_next
    return sites[0] if sites else None


def _is_ours(code: CodeType) -> bool:
    return code.co_filename.startswith(_HERE) or code.co_filename.endswith("contextlib.py")


def _place(site: Site | None) -> str:
    if site is None:
        return ""
    source = linecache.getline(*site).strip()
    return f", {Path(site[0]).name} line {site[1]}" + (f", `{source}`" if source else "")
