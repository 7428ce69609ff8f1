"""Sampling parameters: the fields of `sampling_params`, their ranges, and one place that checks them.

Names, defaults and ranges follow SGLang's, so that its clients work unchanged.
"""

from __future__ import annotations

import re
import reprlib
import sys
from collections.abc import Mapping
from typing import Annotated, Any

import msgspec

from gapless.runtime.core.errors import RequestError

MAX_STOPS = 32
MAX_STOP_CHARS = 1024  # of all stop strings together: the automaton that finds them has a node a character
MAX_BIASES = 1024
MAX_SAMPLES = 16384  # of one prompt, whatever the limits of the server are
GREEDY_BELOW = 1e-6
_BRACKETS = re.compile(r"\\.|[()\[\]{}]", re.DOTALL)
_BRACKETS_AND_STRINGS = re.compile(r'"(?:[^"\\]|\\.)*+"|[()\[\]{}]', re.DOTALL)

# Known to SGLang's and vLLM's clients and not served yet. A value other than the neutral ones given here is refused:
# a parameter that is accepted and ignored would be a wrong answer.
_NOT_YET: dict[str, tuple[Any, ...]] = {"structural_tag": ()}

GRAMMARS = (
    "json_schema",
    "regex",
    "ebnf",
)  # fields that say what the output must match; at most one is given
MAX_GRAMMAR_CHARS = 1 << 17
MAX_GRAMMAR_DEPTH = 100  # brackets within brackets


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How one request is sampled and where it stops; make it with `parse`, which checks every field."""

    # The annotations guard the scheduler's channel; `parse` says what is wrong in words.
    n: Annotated[int, msgspec.Meta(ge=1, le=MAX_SAMPLES)] = 1
    max_new_tokens: Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)] = 128
    min_new_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: Annotated[int, msgspec.Meta(ge=-1, le=2**31 - 1)] = -1
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    no_stop_trim: bool = False
    sampling_seed: int | None = None
    json_schema: str | None = None  # JSON text
    regex: str | None = None
    ebnf: str | None = None

    @property
    def grammar(self) -> tuple[str, str] | None:
        """The field that says what the output must match, and its text."""
        for name in GRAMMARS:
            if (text := getattr(self, name)) is not None:
                return name, text
        return None

    @property
    def adjusts_logits(self) -> bool:
        """Whether the sampler changes this request's logits before it picks from them."""
        additive = self.frequency_penalty or self.presence_penalty or self.logit_bias
        return bool(additive or self.min_new_tokens or self.repetition_penalty != 1)

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW or self.top_k == 1

    @classmethod
    def parse(cls, fields: Mapping[str, Any], prefix: str = "sampling_params") -> SamplingParams:
        """Checks `fields` (JSON types; null means the default; unknown names are ignored).

        Raises RequestError whose `param` is `prefix.<field>`.
        """
        given = {name: value for name, value in fields.items() if value is not None}
        for name, neutral in _NOT_YET.items():
            if name in given and not _is_neutral(given[name], neutral):
                raise RequestError(f"{name} is not supported yet", param=f"{prefix}.{name}")
        names = cls.__struct_fields__
        values = {name: _check(name, given[name], prefix) for name in names if name in given}
        if len(both := [name for name in GRAMMARS if name in values]) > 1:
            raise RequestError(f"give {both[0]} or {both[1]}, not both", param=f"{prefix}.{both[1]}")
        params = cls(**values)
        if params.min_new_tokens > params.max_new_tokens:
            raise RequestError(
                f"min_new_tokens must be at most max_new_tokens, which is {params.max_new_tokens}, "
                f"got {params.min_new_tokens}",
                param=f"{prefix}.min_new_tokens",
            )
        return params


def _is_neutral(value: Any, neutral: tuple[Any, ...]) -> bool:
    return any(type(value) is not bool and value == item for item in neutral)


def _check(name: str, value: Any, prefix: str) -> Any:
    """`value` as the field's type, or RequestError."""

    def refuse(want: str) -> RequestError:
        # reprlib bounds depth, length and count: any JSON value may stand here.
        return RequestError(f"{name} must be {want}, got {reprlib.repr(value)}", param=f"{prefix}.{name}")

    def integer(low: int, high: int, want: str) -> int:
        if type(value) is not int or not low <= value <= high:
            raise refuse(want)
        return value

    def number(low: float, high: float, want: str, *, above_low: bool = False) -> float:
        if type(value) not in (int, float) or not low <= value <= high or (above_low and value == low):
            raise refuse(want)
        return float(value)

    match name:
        case "n":
            return integer(1, MAX_SAMPLES, f"an integer from 1 to {MAX_SAMPLES}")
        case "max_new_tokens" | "min_new_tokens":
            return integer(0, 2**31 - 1, "an integer from 0 to 2147483647")
        case "temperature":
            return number(0, sys.float_info.max, "a finite number, at least 0")
        case "top_p":
            return number(0, 1, "a number above 0 and at most 1", above_low=True)
        case "min_p":
            return number(0, 1, "a number from 0 to 1")
        case "top_k":
            off = type(value) is int and value == -1
            return -1 if off else integer(1, 2**31 - 1, "-1 (off) or an integer of at least 1")
        case "frequency_penalty" | "presence_penalty":
            return number(-2, 2, "a number from -2 to 2")
        case "repetition_penalty":
            return number(0, 2, "a number above 0 and at most 2", above_low=True)
        case "logit_bias":
            return _biases(value, refuse)
        case "sampling_seed":
            return integer(-(2**63), 2**63 - 1, "a 64-bit integer")
        case "stop":
            return _stops(value, refuse)
        case "json_schema" | "regex" | "ebnf":
            return _grammar(name, value, refuse)
        case "stop_token_ids":
            ids = [value] if type(value) is int else value
            if type(ids) not in (list, tuple) or any(type(i) is not int for i in ids):
                raise refuse("a list of token ids")
            if len(ids) > MAX_STOPS:
                raise refuse(f"at most {MAX_STOPS} token ids")
            return tuple(ids)
        case _:
            if type(value) is not bool:
                raise refuse("true or false")
            return value


def _biases(value: Any, refuse: Any) -> dict[int, float]:
    """JSON knows only strings as keys; Python's callers give integers."""
    if not isinstance(value, dict) or len(value) > MAX_BIASES:
        raise refuse(f"an object of at most {MAX_BIASES} token ids with their biases")
    biases: dict[int, float] = {}
    for key, bias in value.items():
        token = int(key) if isinstance(key, str) and key.isdecimal() and len(key) < 11 else key
        known = type(token) is int and 0 <= token < 2**31 and str(token) == str(key)
        if not known or token in biases:
            raise refuse(f"keyed by token ids, each once, which {reprlib.repr(key)} is not")
        if type(bias) not in (int, float) or not -100 <= bias <= 100:
            raise refuse(f"made of numbers from -100 to 100, which that of {token} is not")
        biases[token] = float(bias)
    return biases


def _stops(value: Any, refuse: Any) -> tuple[str, ...]:
    stops = [value] if isinstance(value, str) else value
    if type(stops) not in (list, tuple) or any(type(s) is not str for s in stops):
        raise refuse("a string or a list of strings")
    if len(stops) > MAX_STOPS or not all(stops) or sum(map(len, stops)) > MAX_STOP_CHARS:
        raise refuse(f"at most {MAX_STOPS} strings, none empty, of {MAX_STOP_CHARS} characters together")
    if any("\ud800" <= char <= "\udfff" for stop in stops for char in stop):
        raise refuse("text without lone surrogates: no output can hold one")
    return tuple(stops)


def _grammar(name: str, value: Any, refuse: Any) -> str:
    """The text of a grammar, small enough to be looked at. What it says is checked elsewhere, under a deadline."""
    is_schema = name == "json_schema"
    if is_schema and isinstance(value, dict):
        try:
            value = msgspec.json.encode(value).decode()
        except (TypeError, ValueError, RecursionError) as error:  # from a caller in Python
            raise refuse("a JSON schema, as a string or an object") from error
    if type(value) is not str:
        raise refuse("a JSON schema, as a string or an object" if is_schema else "a string")
    if len(value) > MAX_GRAMMAR_CHARS:
        raise refuse(f"at most {MAX_GRAMMAR_CHARS} characters")
    if any("\ud800" <= char <= "\udfff" for char in value):
        raise refuse("text without lone surrogates")
    if _depth(value, in_quotes=not is_schema) > MAX_GRAMMAR_DEPTH:
        raise refuse(f"nested at most {MAX_GRAMMAR_DEPTH} deep")
    return value


def _depth(text: str, *, in_quotes: bool) -> int:
    """How deep brackets stand in brackets, without escaped ones; those in double quotes count where `in_quotes`."""
    depth = deepest = 0
    for match in _BRACKETS.finditer(text) if in_quotes else _BRACKETS_AND_STRINGS.finditer(text):
        if match[0] in "([{":
            depth += 1
            deepest = max(deepest, depth)
        elif match[0] in ")]}":
            depth = max(depth - 1, 0)
    return deepest
