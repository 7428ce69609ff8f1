"""What holds for the repository as a whole."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCES = [
    "bench",
    "detokenizer",
    "frontend",
    "kernels",
    "overlap",
    "radix_cache",
    "runtime",
    "tokenizer_manager",
]
MODULES = sorted(path for name in SOURCES for path in (ROOT / name).rglob("*.py"))
MAX_LINES = 450


def run_python(code: str) -> str:
    return subprocess.run(
        [sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=60, check=True
    ).stdout


def test_every_source_directory_is_part_of_the_package() -> None:
    links = {path.name: path.resolve() for path in (ROOT / "src/gapless").iterdir() if path.is_symlink()}
    assert links == {name: ROOT / name for name in SOURCES}


@pytest.mark.parametrize(
    "module",
    [
        "gapless",
        "gapless.runtime.cli",
        "gapless.runtime.launch",
        "gapless.runtime.engine",
        "gapless.runtime.demo",
        "gapless.runtime.scheduler.main",
        "gapless.detokenizer.main",
        "gapless.tokenizer_manager.main",
    ],
)
def test_importing_it_does_not_import_torch(module: str) -> None:
    """Torch lives on the device thread of the scheduler's process and nowhere else."""
    assert run_python(f"import sys, {module}; print('torch' in sys.modules)") == "False\n"


def test_engine_and_sampling_params_are_public() -> None:
    assert run_python("from gapless import Engine, SamplingParams; print(Engine.__name__)") == "Engine\n"


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_module_is_short_and_unpickles_nothing(path: Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) <= MAX_LINES
    assert not re.search(r"import pickle|pickle\.load|recv_pyobj|send_pyobj|torch\.load\(", text)


def test_the_version_is_the_same_everywhere() -> None:
    import gapless

    assert tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"] == gapless.__version__
