"""/openapi.json and /docs: complete, consistent, and self-contained."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest

from gapless.runtime.core.config import ServerConfig
from gapless.tokenizer_manager.app import all_routes
from gapless.tokenizer_manager.front import Front


async def document(service: Any) -> dict[str, Any]:
    response = await service.client.get("/openapi.json")
    assert response.status_code == 200
    return dict(response.json())


def strings(value: Any, key: str) -> Iterator[str]:
    """What stands under `key`, anywhere in `value`."""
    if isinstance(value, dict):
        for name, item in value.items():
            if name == key and isinstance(item, str):
                yield item
            yield from strings(item, key)
    elif isinstance(value, list):
        for item in value:
            yield from strings(item, key)


def test_it_describes_every_route_and_nothing_else(run: Any, in_process: Any) -> None:
    async def test() -> None:
        async with in_process() as service:
            described = {
                (method.upper(), path)
                for path, operations in (await document(service))["paths"].items()
                for method in operations
            }
            table = all_routes(Front(ServerConfig(model_path="toy"), lambda message: None))
            assert described == {(m, s.path.replace(":path}", "}")) for s in table for m in s.methods}
            assert all(spec.summary for spec in table)

    run(test())


def test_references_and_operation_ids_are_sound(run: Any, in_process: Any) -> None:
    async def test() -> None:
        async with in_process() as service:
            content = await document(service)
            schemas = content["components"]["schemas"]
            references = set(strings(content, "$ref"))
            assert {f"#/components/schemas/{name}" for name in schemas} >= references
            assert len(references) > 10
            ids = list(strings(content["paths"], "operationId"))
            assert len(set(ids)) == len(ids) == sum(map(len, content["paths"].values()))
            assert content["paths"]["/health"]["get"]["security"] == []

    run(test())


def test_answers_fit_their_schemas(run: Any, in_process: Any) -> None:
    jsonschema = pytest.importorskip("jsonschema")

    async def test() -> None:
        async with in_process(chat_template="chatml") as service:
            content = await document(service)
            bodies: dict[str, dict[str, Any]] = {
                "/generate": {"text": "a", "sampling_params": {"n": 2}},
                "/abort_request": {"rid": "x"},
                "/release_group": {"group_id": "g"},
                "/apply_chat_template": {"messages": [{"role": "user", "content": "a"}]},
                "/tokenize": {"text": ["a"]},
                "/detokenize": {"tokens": [1, 2]},
            }
            for path, operations in content["paths"].items():
                for method, operation in operations.items():
                    schema = (
                        operation["responses"]["200"]["content"].get("application/json", {}).get("schema")
                    )
                    if schema is None or path == "/flush_cache" or (method == "post" and path not in bodies):
                        continue
                    url = path.replace("{id}", "toy")
                    response = await service.client.request(method, url, json=bodies.get(path))
                    assert response.status_code == 200, path
                    jsonschema.validate(response.json(), schema | {"components": content["components"]})
            wrong = await service.client.post("/generate", json={})
            error = {"$ref": "#/components/schemas/Error", "components": content["components"]}
            jsonschema.validate(wrong.json(), error)

    run(test())


def test_the_page_loads_nothing(run: Any, in_process: Any) -> None:
    """No script, no address in it, and a policy that would forbid both."""

    async def test() -> None:
        async with in_process(served_model_name="<script>") as service:
            response = await service.client.get("/docs")
            assert response.headers["content-type"].startswith("text/html")
            assert response.headers["content-security-policy"].startswith("default-src 'none'")
            assert not re.search(
                r"(?i)<script|<link|<img|<iframe|src=|href=|url\(|@import|https?://", response.text
            )
            for path in ("/generate", "/v1/models/{id}", "/docs"):
                assert path in response.text
            assert "GenerateBody" in response.text

    run(test())
