import json
from pathlib import Path

import pytest

RECORDED = Path(__file__).with_name("gemma3_ids.json")


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty artefact cache, so that nothing derived by an older version of the code is tested."""
    monkeypatch.setenv("GAPLESS_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="session")
def recorded() -> list[tuple[str, list[int]]]:
    """Texts, and transformers' ids for them with the demo model's vocabulary."""
    return [(text, ids) for text, ids in json.loads(RECORDED.read_text())]


@pytest.fixture(scope="session")
def texts(recorded: list[tuple[str, list[int]]]) -> list[str]:
    return [text for text, _ in recorded]
