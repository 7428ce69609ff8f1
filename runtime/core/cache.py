"""A cache of built artefacts (converted weights, tokenizers, compiled kernels) in the user's cache directory.

An entry is a directory. It appears by one rename, so that no reader sees half of it; it carries SHA-256 sums,
so that a damaged one is built again; builders of one entry take a lock, so that two servers starting at once
do the work once.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from gapless.runtime.core.errors import ConfigError

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
_SUMS = "sha256.json"
log = logging.getLogger("gapless.cache")


def cache_root() -> Path:
    """`$GAPLESS_CACHE_DIR`, else `$XDG_CACHE_HOME/gapless`, else `~/.cache/gapless`."""
    if own := os.environ.get("GAPLESS_CACHE_DIR"):
        return Path(own)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "gapless"


def file_key(*parts: object, path: Path | None = None) -> str:
    """A key from `parts` and, where given, a file's identity: its absolute path, size and time of change."""
    if path is not None:
        stat = path.stat()
        parts = (*parts, str(path.resolve()), stat.st_size, stat.st_mtime_ns)
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:24]


def cached_dir(kind: str, key: str, build: Callable[[Path], None]) -> Path:
    """The directory of entry `kind/key`; `build(directory)` fills it where it is missing or damaged.

    Raises ConfigError where the cache cannot be written, and what `build` raises.
    """
    final = cache_root() / kind / key
    if _intact(final):
        return final
    with _locked(final.parent / f".{key}.lock"):
        if _intact(final):
            return final
        scratch = _scratch(final)
        try:
            build(scratch)
            sums = {p.name: _sha256(p) for p in sorted(scratch.iterdir())}
            (scratch / _SUMS).write_text(json.dumps(sums))
            _sync(scratch)
            scratch.rename(final)
        except BaseException as error:
            shutil.rmtree(scratch, ignore_errors=True)
            if isinstance(error, OSError) and error.errno in _FULL:
                raise _unwritable(error) from error
            raise
    return final


def _scratch(final: Path) -> Path:
    """An empty directory beside `final`, where nothing stands any more."""
    try:
        if final.exists() or final.is_symlink():
            log.warning("cache entry %s is damaged: building it again", final)
            _remove(final)
        for left in final.parent.glob(f".{final.name}.*/"):  # of a builder that was killed: we hold its lock
            _remove(left)
        return Path(tempfile.mkdtemp(prefix=f".{final.name}.", dir=final.parent))
    except OSError as error:
        raise _unwritable(error) from error


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def _unwritable(error: OSError) -> ConfigError:
    return ConfigError(f"cannot write the cache {cache_root()} (GAPLESS_CACHE_DIR moves it): {error}")


def _intact(entry: Path) -> bool:
    try:
        sums: dict[str, str] = json.loads((entry / _SUMS).read_text())
        return bool(sums) and all(_sha256(entry / name) == want for name, want in sums.items())
    except (OSError, ValueError, AttributeError, RecursionError):  # any bytes may stand there
        return False


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(directory: Path) -> None:
    for path in [*directory.iterdir(), directory]:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("w")
    except OSError as error:
        raise _unwritable(error) from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            log.info("waiting for another process that builds %s", path.parent.name)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
