"""What a program can append to its state besides text: calls of the model, and the marks of roles.

An expression is immutable and may be appended any number of times, to several forks for instance.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn, TypedDict, Unpack

from gapless.frontend.backends.select import METHODS, token_length_normalized


class Sampling(TypedDict, total=False):
    """The sampling parameters of `gen` and `run`, by /generate's names and SGLang's; None is as if not given."""

    max_new_tokens: int | None  # SGLang's DSL calls it max_tokens
    min_tokens: int | None  # its name of min_new_tokens
    min_new_tokens: int | None
    n: int | None
    stop: str | Sequence[str] | None
    stop_token_ids: Sequence[int] | None
    temperature: float | None
    top_p: float | None
    top_k: int | None
    min_p: float | None
    frequency_penalty: float | None
    presence_penalty: float | None
    repetition_penalty: float | None
    logit_bias: Mapping[int, float] | None
    sampling_seed: int | None
    ignore_eos: bool | None
    skip_special_tokens: bool | None
    no_stop_trim: bool | None
    regex: str | None
    ebnf: str | None
    json_schema: str | Mapping[str, Any] | None
    return_logprob: bool | None
    logprob_start_len: int | None
    top_logprobs_num: int | None
    return_text_in_logprobs: bool | None


_ALIASES = {"max_tokens": "max_new_tokens", "min_tokens": "min_new_tokens"}
SAMPLING = frozenset(Sampling.__annotations__) | _ALIASES.keys()
_GRAMMARS = ("regex", "ebnf", "json_schema")
_TYPES: dict[Any, str] = {  # dtype of `gen`: what its text must match
    int: r"-?(0|[1-9][0-9]*)",
    float: r"-?(0|[1-9][0-9]*)\.[0-9]+",
    bool: r"(True|False)",
    str: r'"[^"\\\r\n]*"',
}
_TYPES |= {kind.__name__: pattern for kind, pattern in _TYPES.items()} | {"string": _TYPES[str]}


class Expression:
    """Adding expressions and text gives an expression."""

    __slots__ = ()

    def __add__(self, other: object) -> Expression:
        return Concatenation((*leaves(self), *leaves(other)))

    def __radd__(self, other: object) -> Expression:
        return Concatenation((*leaves(other), *leaves(self)))

    def __format__(self, spec: str) -> NoReturn:
        """In an f-string it would be a text that says how it is written."""
        raise TypeError(f"{self!r:.80} is not text: write it outside of the f-string, joined by +")


Leaf = str | Expression  # what is not a concatenation


@dataclass(frozen=True, slots=True)
class _Named(Expression):
    """Sets a variable, where it has a name. Raises TypeError where that is no string."""

    name: str | None

    def __post_init__(self) -> None:
        if not isinstance(self.name, str | None):
            raise TypeError(f"a variable's name must be a string, got {self.name!r:.80}")


@dataclass(frozen=True, slots=True)
class Gen(_Named):
    params: Mapping[str, Any] = field(default_factory=dict)  # by /generate's names


@dataclass(frozen=True, slots=True)
class Select(_Named):
    choices: tuple[str, ...]
    method: str


@dataclass(frozen=True, slots=True)
class RoleBegin(Expression):
    role: str


@dataclass(frozen=True, slots=True)
class RoleEnd(Expression):
    role: str


@dataclass(frozen=True, slots=True)
class ScopeBegin(_Named):
    """From here on, the text is the value of a variable to be."""


@dataclass(frozen=True, slots=True)
class ScopeEnd(_Named):
    """Of the scope that was begun last."""


@dataclass(frozen=True, slots=True)
class Concatenation(Expression):
    items: tuple[Leaf, ...]


def leaves(value: object) -> tuple[Leaf, ...]:
    """The texts and single expressions that `value` is made of, in order."""
    if isinstance(value, str):
        return (value,) if value else ()
    if isinstance(value, Concatenation):
        return value.items
    if isinstance(value, Expression):
        return (value,)
    raise TypeError(
        f"a program's state is made of text and of expressions such as gen(), not of {type(value).__name__}"
        f" ({value!r:.80}); write str(...) where its text is meant"
    )


def sampling(params: Mapping[str, Any]) -> dict[str, Any]:
    """What was given of `Sampling`, by /generate's names. Raises TypeError for what it does not know."""
    given: dict[str, Any] = {}
    for name, value in params.items():
        if name not in SAMPLING:
            raise TypeError(f"{name!r} is no sampling parameter; there are: {', '.join(sorted(SAMPLING))}")
        if value is None:
            continue
        if (target := _ALIASES.get(name, name)) in given:
            raise TypeError(f"give {name} once: it is the same as {target}")
        given[target] = json.dumps(value) if name == "json_schema" and isinstance(value, Mapping) else value
    return given


def gen(
    name: str | None = None,
    max_tokens: int | None = None,
    *,
    choices: Sequence[str] | None = None,
    choices_method: str | None = None,
    dtype: type | str | None = None,
    **params: Unpack[Sampling],
) -> Expression:
    """Text by the model, kept as the variable `name`. Its parameters go before those given to `run`.

    With `choices` it is a `select`, and the sampling parameters do not matter. `dtype` (int, float, bool or str) is
    short for the `regex` of such a value; the variable is its text. With `n` above 1 the variable is a list and the
    program goes on after the first sample.
    """
    given = sampling({"max_tokens": max_tokens, **params})
    if choices is not None:
        return select(name, choices, choices_method=choices_method)
    if choices_method is not None:
        raise ValueError("choices_method is for gen(choices=...)")
    if dtype is not None:
        if dtype not in _TYPES:
            raise ValueError(f"dtype must be int, float, bool or str, got {dtype!r}")
        if both := [grammar for grammar in _GRAMMARS if grammar in given]:
            raise ValueError(f"give dtype or {both[0]}, not both")
        given["regex"] = _TYPES[dtype]
    return Gen(name, given)


def gen_int(name: str | None = None, max_tokens: int | None = None, **params: Unpack[Sampling]) -> Expression:
    """`gen` of an integer's digits."""
    return gen(name, max_tokens, dtype=int, **params)


def gen_string(
    name: str | None = None, max_tokens: int | None = None, **params: Unpack[Sampling]
) -> Expression:
    """`gen` of a string on one line, with its double quotes and without escapes."""
    return gen(name, max_tokens, dtype=str, **params)


def select(
    name: str | None = None,
    choices: Sequence[str] | None = None,
    temperature: float = 0.0,
    choices_method: str | None = None,
) -> Expression:
    """The choice that the model finds likeliest, by `choices_method`, one of `select.METHODS`."""
    if temperature > 1e-5:
        raise ValueError("select takes the best choice and does not sample: leave temperature out")
    if isinstance(choices, str) or not choices or not all(isinstance(choice, str) for choice in choices):
        raise ValueError(f"choices must be a list of at least one string, got {choices!r:.80}")
    method = token_length_normalized if choices_method is None else choices_method
    if method not in METHODS:
        raise ValueError(f"choices_method must be one of {', '.join(METHODS)}, got {method!r}")
    return Select(name, tuple(choices), method)


def turn(role: str, content: object) -> Expression:
    """A whole turn, which may be empty. Raises TypeError for what a state is not made of."""
    return Concatenation((RoleBegin(role), *leaves("" if content is None else content), RoleEnd(role)))


def system(content: str | Expression | None = None) -> Expression:
    """A whole turn, written by the model's chat template; so are `user` and `assistant`."""
    return turn("system", content)


def user(content: str | Expression | None = None) -> Expression:
    return turn("user", content)


def assistant(content: str | Expression | None = None) -> Expression:
    return turn("assistant", content)


def system_begin() -> Expression:
    return RoleBegin("system")


def system_end() -> Expression:
    return RoleEnd("system")


def user_begin() -> Expression:
    return RoleBegin("user")


def user_end() -> Expression:
    return RoleEnd("user")


def assistant_begin() -> Expression:
    return RoleBegin("assistant")


def assistant_end() -> Expression:
    return RoleEnd("assistant")


def image(*_: object, **__: object) -> NoReturn:
    """Not there: raises NotImplementedError, as does `video`."""
    raise NotImplementedError("gapless serves models of text: image() is not supported")


def video(*_: object, **__: object) -> NoReturn:
    raise NotImplementedError("gapless serves models of text: video() is not supported")
