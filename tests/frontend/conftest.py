"""The default backend of a test is gone when it ends."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import gapless


@pytest.fixture(autouse=True)
def no_default_backend() -> Iterator[None]:
    yield
    gapless.set_default_backend(None)
