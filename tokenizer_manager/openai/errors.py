"""Errors in the words of OpenAI's fields, where a request was refused as the /generate it was turned into."""

from __future__ import annotations

import re
from collections.abc import Mapping

from gapless.runtime.core.errors import RequestError

# /generate's sampling fields that have other names here.
SAMPLING_NAMES = {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens", "sampling_seed": "seed"}
_NAME = re.compile(r"(?<![\w.])(?:(?:sampling_params|tools)\.)?(\w+)")  # a field's, with its origin


def renamed(error: RequestError, names: Mapping[str, str]) -> RequestError:
    """`error` with the `names` of /generate's fields, and SAMPLING_NAMES, replaced in its text and its `param`."""
    # Beyond its first word a message may use a field's name as a plain word, such as text.
    head, space, rest = error.message.partition(" ")
    message = _replace(head, {**names, **SAMPLING_NAMES}) + space + _replace(rest, SAMPLING_NAMES)
    return type(error)(message, param=error.param and _replace(error.param, {**names, **SAMPLING_NAMES}))


def _replace(text: str, names: Mapping[str, str]) -> str:
    return _NAME.sub(lambda match: names.get(match[0], names.get(match[1], match[1])), text)
