"""Cache entries appear whole, are built once, and are built again when they are damaged."""

import errno
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from gapless.runtime.core.cache import cache_root, cached_dir, file_key
from gapless.runtime.core.errors import ConfigError


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("GAPLESS_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def writer(text: str = "weights", calls: list[Path] | None = None) -> Callable[[Path], None]:
    def build(directory: Path) -> None:
        if calls is not None:
            calls.append(directory)
        (directory / "data").write_text(text)

    return build


def test_an_entry_is_built_once() -> None:
    calls: list[Path] = []
    first = cached_dir("weights", "k", writer(calls=calls))
    assert (first / "data").read_text() == "weights"
    assert cached_dir("weights", "k", writer(calls=calls)) == first
    assert len(calls) == 1


def damage_flip(entry: Path) -> None:
    (entry / "data").write_text("weighty")


def damage_cut(entry: Path) -> None:
    (entry / "data").write_text("weig")


def damage_remove(entry: Path) -> None:
    (entry / "data").unlink()


def damage_sums(entry: Path) -> None:
    (entry / "sha256.json").write_text("{")


def damage_no_sums(entry: Path) -> None:
    (entry / "sha256.json").write_text("{}")
    (entry / "data").unlink()


def damage_nested_sums(entry: Path) -> None:
    (entry / "sha256.json").write_text("[" * 100_000)


def damage_file(entry: Path) -> None:
    shutil.rmtree(entry)
    entry.touch()


def damage_link(entry: Path) -> None:
    """As left where the cache was moved by hand."""
    entry.rename(entry.parent / "moved")
    entry.symlink_to(entry.parent / "moved again")


def damage_link_to_another(entry: Path) -> None:
    (entry.parent / "other").mkdir()
    shutil.rmtree(entry)
    entry.symlink_to(entry.parent / "other")


@pytest.mark.parametrize(
    "damage",
    [
        damage_flip, damage_cut, damage_remove, damage_sums, damage_no_sums, damage_nested_sums, damage_file,
        damage_link, damage_link_to_another,
    ],
)  # fmt: skip
def test_a_damaged_entry_is_built_again(damage: Callable[[Path], None]) -> None:
    entry = cached_dir("weights", "k", writer())
    damage(entry)
    assert (cached_dir("weights", "k", writer("new")) / "data").read_text() == "new"


def test_a_failed_build_leaves_nothing_and_can_be_repeated(root: Path) -> None:
    def fail(directory: Path) -> None:
        (directory / "data").write_text("half")
        raise ValueError("full")

    with pytest.raises(ValueError, match="full"):
        cached_dir("weights", "k", fail)
    assert [path for path in (root / "weights").iterdir() if path.is_dir()] == []
    assert (cached_dir("weights", "k", writer()) / "data").read_text() == "weights"


def test_what_a_killed_builder_left_is_removed(root: Path) -> None:
    code = (
        "import os\nfrom gapless.runtime.core.cache import cached_dir\n"
        "def build(directory):\n (directory / 'data').write_text('half')\n os.kill(os.getpid(), 9)\n"
        "cached_dir('weights', 'k', build)\n"
    )
    subprocess.run([sys.executable, "-P", "-c", code], check=False, timeout=60)
    assert len([path for path in (root / "weights").iterdir() if path.is_dir()]) == 1
    entry = cached_dir("weights", "k", writer())
    assert [path for path in (root / "weights").iterdir() if path.is_dir()] == [entry]


def test_two_threads_build_one_entry_once() -> None:
    calls: list[Path] = []
    inside, go = threading.Event(), threading.Event()

    def slow(directory: Path) -> None:
        inside.set()
        assert go.wait(20)
        writer(calls=calls)(directory)

    entries: list[Path] = []
    threads = [threading.Thread(target=lambda: entries.append(cached_dir("w", "k", slow))) for _ in range(2)]
    for thread in threads:
        thread.start()
    assert inside.wait(20)
    go.set()
    for thread in threads:
        thread.join(20)
    assert len(calls) == 1
    assert len(set(entries)) == 1


def test_two_processes_build_one_entry_once(root: Path, tmp_path: Path) -> None:
    code = (
        "import os, sys, time\nfrom pathlib import Path\nfrom gapless.runtime.core.cache import cached_dir\n"
        "here = Path(sys.argv[1])\n"
        "def build(directory):\n"
        " while len(list(here.glob('started-*'))) < 2: time.sleep(0.01)\n"
        " (here / f'built-by-{os.getpid()}').touch()\n"
        " (directory / 'data').write_text('weights')\n"
        "(here / f'started-{os.getpid()}').touch()\n"
        "cached_dir('weights', 'k', build)\n"
    )
    builders = [subprocess.Popen([sys.executable, "-P", "-c", code, str(tmp_path)]) for _ in range(2)]
    assert [builder.wait(timeout=60) for builder in builders] == [0, 0]
    assert len(list(tmp_path.glob("built-by-*"))) == 1
    assert (root / "weights" / "k" / "data").read_text() == "weights"


def test_the_key_of_a_file_follows_its_content(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_text("a")
    first = file_key("bf16", path=file)
    assert first == file_key("bf16", path=file) != file_key("f32", path=file)
    file.write_text("ab")
    assert file_key("bf16", path=file) != first


def test_a_cache_that_cannot_be_written_is_one_clear_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("GAPLESS_CACHE_DIR", str(tmp_path / "file" / "cache"))
    with pytest.raises(ConfigError, match="GAPLESS_CACHE_DIR"):
        cached_dir("weights", "k", writer())


def test_a_disk_without_room_for_an_entry_is_one_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(**_: object) -> str:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("tempfile.mkdtemp", full)
    with pytest.raises(ConfigError, match=r"GAPLESS_CACHE_DIR.*No space left"):
        cached_dir("weights", "k", writer())


def test_the_root_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("GAPLESS_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_root() == tmp_path / "gapless"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/someone")
    assert cache_root() == Path("/home/someone/.cache/gapless")


def test_a_full_disk_is_one_clear_error_and_leaves_nothing() -> None:
    def build(directory: Path) -> None:
        (directory / "part").write_text("x")
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(ConfigError, match=r"cannot write the cache .*No space left"):
        cached_dir("kind", "full", build)
    assert [path.name for path in (cache_root() / "kind").iterdir()] == [".full.lock"]
