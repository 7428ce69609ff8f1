"""Keys over HTTP: every route of the table is closed without one, and what disturbs others needs the admin's."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from gapless.runtime.core.config import ServerConfig
from gapless.tokenizer_manager.app import all_routes
from gapless.tokenizer_manager.front import Front

KEY, ADMIN = {"authorization": "Bearer sesame"}, {"authorization": "Bearer open"}
TABLE = [
    (method, spec.path.replace("{id:path}", "toy"), spec.admin)
    for spec in all_routes(Front(ServerConfig(model_path="toy"), lambda message: None))
    for method in spec.methods
]


def test_the_table_names_each_path_and_method_once() -> None:
    assert len({(method, path) for method, path, _ in TABLE}) == len(TABLE) > 15


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"authorization": ""},
        {"authorization": "Bearer"},
        {"authorization": "Bearer "},
        {"authorization": "Bearer sesam"},
        {"authorization": "Bearer sesamee"},
        {"authorization": "Bearer sésame"},
        {"authorization": "Basic sesame"},
        {"authorization": "sesame"},
        {"x-api-key": "sesame"},
    ],
)
def test_every_route_but_health_is_closed_without_the_key(
    run: Any, in_process: Any, headers: dict[str, str]
) -> None:
    """Paths that no route has, too, and HEAD; /health only when it is spelt so."""

    async def test() -> None:
        async with in_process(api_key="sesame", admin_api_key="open") as service:
            encoded = {name: value.encode() for name, value in headers.items()}
            others = [("HEAD", "/metrics", False), ("GET", "/nowhere", False), ("GET", "/health%0A", False)]
            others += [("GET", "/health/", False), ("GET", "//health", False), ("PUT", "/generate", False)]
            for method, path, _ in TABLE + others:
                response = await service.client.request(method, path, headers=encoded)
                if path == "/health":
                    assert response.status_code == 200
                    continue
                assert response.status_code == 401, path
                assert response.headers["www-authenticate"] == "Bearer"
                if method != "HEAD":
                    assert response.json()["error"]["code"] == "invalid_api_key"

    run(test())


@pytest.mark.parametrize("headers", [KEY, ADMIN, {"Authorization": "bearer  sesame "}])
def test_either_key_opens_what_is_not_the_admins(run: Any, in_process: Any, headers: dict[str, str]) -> None:
    async def test() -> None:
        async with in_process(api_key="sesame", admin_api_key="open") as service:
            body = {"text": "a", "sampling_params": {"max_new_tokens": 1}}
            assert (await service.client.post("/generate", json=body, headers=headers)).status_code == 200
            for method, path, admin in TABLE:
                if method == "GET" and not admin and path != "/health_generate":
                    assert (await service.client.get(path, headers=headers)).status_code == 200, path
            assert (await service.client.get("/nowhere", headers=headers)).status_code == 404

    run(test())


def test_two_headers_with_keys_are_no_key(run: Any, in_process: Any) -> None:
    async def test() -> None:
        async with in_process(api_key="sesame") as service:
            headers = [("authorization", "Bearer wrong"), ("authorization", "Bearer sesame")]
            assert (await service.client.get("/v1/models", headers=headers)).status_code == 401

    run(test())


@pytest.mark.parametrize(("site", "status"), [("cross-site", 403), ("same-site", 403), ("none", 200)])
def test_no_web_page_disturbs_a_local_server(run: Any, in_process: Any, site: str, status: int) -> None:
    """A browser says who sends what it sends; without a key that is all that keeps other pages out."""

    async def test() -> None:
        async with in_process() as service:
            headers = {"sec-fetch-site": site}
            response = await service.client.post("/abort_request", json={"abort_all": True}, headers=headers)
            assert response.status_code == status
        async with in_process(admin_api_key="open") as service:
            response = await service.client.post(
                "/abort_request", json={"abort_all": True}, headers=headers | ADMIN
            )
            assert response.status_code == 200

    run(test())


@pytest.mark.parametrize(
    ("options", "headers", "status"),
    [
        ({}, {}, 200),  # on loopback everyone is trusted
        ({"host": "::1"}, {}, 200),
        ({"api_key": "sesame"}, KEY, 200),
        ({"admin_api_key": "open"}, {}, 401),
        ({"admin_api_key": "open"}, ADMIN, 200),
        ({"admin_api_key": "open", "api_key": "sesame"}, KEY, 401),
        ({"admin_api_key": "open", "api_key": "sesame"}, ADMIN, 200),
        ({"host": "0.0.0.0"}, {}, 403),
        ({"host": "0.0.0.0", "api_key": "sesame"}, KEY, 403),
        ({"host": "0.0.0.0", "api_key": "sesame", "admin_api_key": "open"}, KEY, 401),
        ({"host": "0.0.0.0", "admin_api_key": "open"}, ADMIN, 200),
        ({"host": "example.org"}, {}, 403),
    ],
)
def test_what_disturbs_others_is_the_admins(
    run: Any, in_process: Any, options: dict[str, str], headers: dict[str, str], status: int
) -> None:
    """Off without an admin key on a public address; one's own request may be aborted by anyone who may send one."""

    async def test() -> None:
        async with in_process(**options) as service:
            flushing = asyncio.create_task(service.client.post("/flush_cache", headers=headers))
            if status == 200:
                await service.engine.answer_flush()
            assert (await flushing).status_code == status
            for path in [path for method, path, admin in TABLE if admin and status != 200]:
                assert (await service.client.post(path, headers=headers)).status_code == status
            body = {"abort_all": True}
            response = await service.client.post("/abort_request", json=body, headers=headers)
            assert response.status_code == status
            own = KEY if "api_key" in options else headers
            response = await service.client.post("/abort_request", json={"rid": "x"}, headers=own)
            assert response.status_code == 200

    run(test())
