from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from gapless.kernels.ops import Ops, choose_ops
from gapless.runtime.core.errors import ConfigError


@pytest.fixture(scope="session", params=["torch", "native"])
def ops(request: pytest.FixtureRequest) -> Ops:
    """Every implementation that works on this machine's CPU."""
    if request.param == "native":
        pytest.importorskip("gapless.kernels.cpu")
    try:
        return choose_ops(request.param, torch.device("cpu"))
    except ConfigError as error:
        pytest.skip(str(error))


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Models as tiny as these spend their time waiting for threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache directory of the test's own."""
    monkeypatch.setenv("GAPLESS_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"
