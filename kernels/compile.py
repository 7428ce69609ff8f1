"""Compiles the C kernels with the system's compiler on first use; the result stays in the user's cache.

No OpenMP runtime is linked: `native.c` says how it joins torch's threads, so that a process never has two teams.
"""

from __future__ import annotations

import os
import platform
import shlex
import shutil
import subprocess
from pathlib import Path

from gapless.runtime.core.cache import cached_dir, file_key

_FLAGS = [
    "-O3",
    "-std=gnu11",
    "-fopenmp-simd",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fvisibility=hidden",
]
_SOURCES = sorted(Path(__file__).parent.glob("native*.c"))


class CompileError(Exception):
    """The kernels cannot be built or loaded here; the message says why."""


def compile_kernels(march: str = "native") -> Path:
    """The shared library for `-march=march`, compiled unless the cache has it; raises CompileError."""
    compiler = _find_compiler()
    command = [*compiler, *_FLAGS, f"-march={march}"]
    version = _run([*compiler, "--version"])
    key = file_key(command, version, _cpu_flags(), [source.read_bytes() for source in _SOURCES])

    def build(directory: Path) -> None:
        main = Path(__file__).parent / "native.c"
        _run([*command, "-shared", "-fPIC", str(main), "-o", str(directory / "native.so"), "-lm"])

    return cached_dir("kernels", key, build) / "native.so"


def _find_compiler() -> list[str]:
    """`$CC`, which may carry arguments, and nothing else where it is set; otherwise the first of cc, gcc, clang."""
    candidates = [os.environ["CC"]] if os.environ.get("CC") else ["cc", "gcc", "clang"]
    for candidate in candidates:
        words = shlex.split(candidate)
        if words and shutil.which(words[0]):
            return words
    raise CompileError(f"no C compiler found (tried {', '.join(candidates)})")


def _run(command: list[str]) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except subprocess.CalledProcessError as error:
        raise CompileError(f"{shlex.join(command)} failed:\n{error.stderr.strip()[-2000:]}") from error


def _cpu_flags() -> str:
    """What `-march=native` depends on: one cache directory may be shared by different machines."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    flags = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return platform.machine() + flags
