from __future__ import annotations

import pytest
from table_model import MARKOV, TableModel


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> TableModel:
    """The model that is loaded whatever the path."""
    model = TableModel(MARKOV)
    monkeypatch.setattr("gapless.overlap.torch_steps.resolve_model_path", lambda path: path)
    monkeypatch.setattr("gapless.runtime.model.loader.load_model", lambda *_: model)
    return model
