"""Where keys come from, what is refused, and that they are never shown."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from gapless.runtime.core.config import ServerConfig
from gapless.runtime.core.errors import ConfigError
from gapless.runtime.core.keys import VARIABLES, is_loopback, take_keys
from gapless.runtime.core.options import command_line


@pytest.fixture(autouse=True)
def no_keys_around(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in VARIABLES.values():
        monkeypatch.delenv(variable, raising=False)


def test_argument_before_file_before_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text("from-file\n")
    monkeypatch.setenv("GAPLESS_API_KEY", "from-environment")
    monkeypatch.setenv("GAPLESS_ADMIN_API_KEY", "admin")
    taken = take_keys(ServerConfig(api_key="argument", api_key_file=str(file)))
    assert (taken.api_key, taken.admin_api_key) == ("argument", "admin")
    monkeypatch.setenv("GAPLESS_API_KEY", "from-environment")
    taken = take_keys(ServerConfig(api_key_file=str(file)))
    assert (taken.api_key, taken.admin_api_key) == ("from-file", "")
    monkeypatch.setenv("GAPLESS_API_KEY", "from-environment")
    assert take_keys(ServerConfig()).api_key == "from-environment"
    assert take_keys(ServerConfig()).api_key == "", "a child would inherit it"


@pytest.mark.parametrize("content", [None, b"", b" \n", b"\xff\xfe", b"two words", "schlüssel".encode()])
def test_a_file_without_a_usable_key_is_refused(tmp_path: Path, content: bytes | None) -> None:
    """Never a server without a key because its file was empty."""
    file = tmp_path / "key"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        take_keys(ServerConfig(admin_api_key_file=str(file)))
    assert "words" not in caught.value.message
    assert "schl" not in caught.value.message


def test_a_configuration_shows_no_key() -> None:
    config = ServerConfig(
        api_key="sesame", admin_api_key="sesame2", api_key_file="/sesame", admin_api_key_file="/sesame"
    )
    assert "sesame" not in repr(config)
    assert "sesame" not in str(config.public())
    assert command_line(config) == []
    assert config.without_secrets() == ServerConfig()


@pytest.mark.skipif(sys.platform != "linux", reason="the process list is hidden on Linux alone")
def test_a_key_vanishes_from_the_process_list() -> None:
    """Both ways to write an option; an argument that only contains the key is left alone."""
    code = (
        "from pathlib import Path; from gapless.runtime.core.keys import hide_arguments; "
        "hide_arguments(['sesame']); print(Path('/proc/self/cmdline').read_text().split(chr(0))[4:-1])"
    )
    arguments = ["--api-key=sesame", "--api-key", "sesame", "--model-path=sesame-street", "last"]
    shown = subprocess.run(
        [sys.executable, "-P", "-c", code, *arguments], capture_output=True, text=True, check=True
    ).stdout
    assert shown.strip() == repr(
        ["--api-key=xxxxxx", "--api-key", "xxxxxx", "--model-path=sesame-street", "last"]
    )


@pytest.mark.parametrize(
    ("host", "loopback"),
    [
        ("127.0.0.1", True), ("127.9.9.9", True), ("::1", True), ("localhost", True),
        ("0.0.0.0", False), ("::", False), ("10.0.0.1", False), ("fe80::1%eth0", False), ("example.org", False),
        ("localhost.example.org", False), ("", False),
    ],
)  # fmt: skip
def test_loopback(host: str, loopback: bool) -> None:
    assert is_loopback(host) is loopback
