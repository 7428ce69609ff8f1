"""Keys and the real server: they open it, and nothing that anyone can look at shows them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

KEY, ADMIN = "sesame-4711", "open-4711"


def headers(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def given(how: str, tmp_path: Path) -> tuple[list[str], dict[str, str]]:
    """The options and the environment that give both keys."""
    if how == "argument":
        return [f"--api-key={KEY}", "--admin-api-key", ADMIN], {}
    if how == "environment":
        return [], {"GAPLESS_API_KEY": KEY, "GAPLESS_ADMIN_API_KEY": ADMIN}
    (tmp_path / "user").write_text(KEY + "\n")
    (tmp_path / "admin").write_text(ADMIN)
    return [f"--api-key-file={tmp_path}/user", f"--admin-api-key-file={tmp_path}/admin"], {}


@pytest.mark.parametrize("how", ["argument", "environment", "file"])
def test_keys_open_the_server_and_show_nowhere(serve: Any, tmp_path: Path, how: str) -> None:
    """Not in an answer, the log, the process list, nor the environment of a child; and no prompt in the log."""
    options, env = given(how, tmp_path)
    server = serve(*options, "--log-level=debug", env=env)
    body = {"text": "a secret prompt", "sampling_params": {"max_new_tokens": 4, "ignore_eos": True}}
    assert httpx.post(f"{server.url}/generate", json=body).status_code == 401
    wrong = httpx.post(f"{server.url}/generate", json=body, headers=headers("wrong-4711"))
    assert wrong.status_code == 401
    answer = httpx.post(f"{server.url}/generate", json=body, headers=headers(KEY), timeout=30)
    assert answer.status_code == 200
    assert httpx.post(f"{server.url}/flush_cache", headers=headers(KEY)).status_code == 401
    assert httpx.post(f"{server.url}/flush_cache", headers=headers(ADMIN), timeout=30).status_code == 200
    shown = [wrong.text, answer.text, httpx.get(f"{server.url}/health").text]
    paths = httpx.get(f"{server.url}/openapi.json", headers=headers(KEY)).json()["paths"]
    for path, operations in paths.items():
        if "get" in operations:
            shown.append(httpx.get(f"{server.url}{path}", headers=headers(KEY), timeout=30).text)
    children = server.children()
    pids = [server.process.pid, *(child.pid for child in children.values())]
    shown += [Path(f"/proc/{pid}/cmdline").read_text() for pid in pids]
    shown += [Path(f"/proc/{child.pid}/environ").read_text() for child in children.values()]
    for child in children.values():
        child.close()
    server.stop()
    shown.append(server.log)
    assert len(shown) > 20
    for text in shown:
        assert KEY not in text
        assert ADMIN not in text
    assert "4711" not in server.log
    assert "secret prompt" not in server.log


@pytest.mark.parametrize(("options", "warns"), [((), True), ((f"--api-key={KEY}",), False)])
def test_a_public_address_without_a_key_is_said_at_the_start(
    serve: Any, options: tuple[str, ...], warns: bool
) -> None:
    server = serve("--host=0.0.0.0", *options)
    assert ("warning: whoever reaches 0.0.0.0 can use this server" in server.log) == warns
    port = httpx.URL(server.url).port
    refused = httpx.post(f"http://127.0.0.1:{port}/flush_cache", headers=headers(KEY))
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "forbidden")
    server.stop()


def test_loopback_warns_of_nothing(serve: Any) -> None:
    server = serve()
    assert "warning" not in server.log
    assert httpx.URL(server.url).host == "127.0.0.1"
