"""API keys: where they come from, and how they stay out of the process list."""

from __future__ import annotations

import ctypes
import dataclasses
import ipaddress
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from gapless.runtime.core.config import ServerConfig
from gapless.runtime.core.errors import ConfigError

VARIABLES = {"api_key": "GAPLESS_API_KEY", "admin_api_key": "GAPLESS_ADMIN_API_KEY"}
_ARG_START, _ARG_END = 48, 49  # fields of /proc/self/stat, counted from 1


def take_keys(config: ServerConfig) -> ServerConfig:
    """`config` with its keys, from an argument, a file or the environment, in this order.

    Afterwards no key stands in this process's command line (on Linux), nor in the environment that its children
    inherit. Raises ConfigError where a file cannot be read or a key could not be sent in a header.
    """
    hide_arguments(filter(None, (config.api_key, config.admin_api_key)))
    found: dict[str, Any] = {}
    for name, variable in VARIABLES.items():
        from_environment = os.environ.pop(variable, "")
        path = getattr(config, f"{name}_file")
        found[name] = getattr(config, name) or (_read(path, name) if path else from_environment)
        _check(found[name], name)
    return dataclasses.replace(config, **found)


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a server bound to `host`; a name other than localhost counts as public."""
    try:
        return ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return host == "localhost"


def hide_arguments(words: Iterable[str]) -> None:
    """Overwrites each of `words` that is an argument of this process, or the value of one, in the process list."""
    if sys.platform != "linux":
        return
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = (int(fields[number - 3]) for number in (_ARG_START, _ARG_END))  # the first two are cut off
    arguments = ctypes.string_at(start, end - start)
    for word in map(os.fsencode, words):
        at = start
        for argument in arguments.split(b"\0"):
            if argument == word or (argument.startswith(b"--") and argument.endswith(b"=" + word)):
                ctypes.memset(at + len(argument) - len(word), ord("x"), len(word))
            at += len(argument) + 1


def _read(path: str, name: str) -> str:
    option = f"--{name.replace('_', '-')}-file"
    try:
        key = Path(path).expanduser().read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "not a text"
        raise ConfigError(f"{option} {path}: {why}", param=f"{name}_file") from error
    if not key:
        raise ConfigError(f"{option} {path}: the file is empty", param=f"{name}_file")
    return key


def _check(key: str, name: str) -> None:
    if not all("!" <= char <= "~" for char in key):
        raise ConfigError(f"{name}: a key is made of visible ASCII characters", param=name)
