"""What the server says of itself: models, load, and that no key is in it."""

from __future__ import annotations

from typing import Any

import pytest

from gapless.runtime.core.messages import Finish, Heartbeat


def test_models_in_the_shape_of_openai(run: Any, in_process: Any) -> None:
    async def test() -> None:
        async with in_process(served_model_name="org/name") as service:
            listed = (await service.client.get("/v1/models")).json()
            assert listed["object"] == "list"
            (model,) = listed["data"]
            assert (model["id"], model["object"], model["owned_by"]) == ("org/name", "model", "gapless")
            assert (model["root"], model["max_model_len"]) == ("toy", 64)
            assert model["created"] > 1_600_000_000
            for path in ("/v1/models/org/name", "/v1/models/org%2Fname"):
                assert (await service.client.get(path)).json() == model

    run(test())


@pytest.mark.parametrize("name", ["other", "name", "org/name/x", "%00", "%0A", "x" * 3000])
def test_an_unknown_model_is_404_in_the_shape_of_openai(run: Any, in_process: Any, name: str) -> None:
    async def test() -> None:
        async with in_process(served_model_name="org/name") as service:
            response = await service.client.get(f"/v1/models/{name}")
            assert response.status_code == 404
            error = response.json()["error"]
            assert (error["code"], error["param"]) in (("model_not_found", "model"), ("not_found", None))
            assert set(error) == {"message", "type", "param", "code"}
            assert len(error["message"]) < 3100

    run(test())


def test_load_counts_what_is_alive(run: Any, on_a_socket: Any) -> None:
    """The types that sglang-router's power_of_two reads; requests count as soon as they are taken."""

    async def test() -> None:
        async with on_a_socket() as service:
            task, submit = await service.start(text="abc")
            service.front.handle(Heartbeat(0.0, 0.0, 1, 2, 128, 9))
            load = (await service.client.get("/get_load")).json()
            assert load == [{"dp_rank": 0, "num_reqs": 1, "num_waiting_reqs": 2, "num_tokens": 128}]
            service.engine.gain(submit.uid, "x", [1], Finish.LENGTH)
            await task
            assert (await service.client.get("/get_load")).json()[0]["num_reqs"] == 0

    run(test())


def test_no_get_route_shows_a_key_or_where_it_lies(run: Any, in_process: Any) -> None:
    options = {
        "api_key": "sesame1",
        "admin_api_key": "sesame2",
        "api_key_file": "/sesame3",
        "admin_api_key_file": "/sesame4",
    }

    async def test() -> None:
        async with in_process(**options) as service:
            headers = {"authorization": "Bearer sesame1"}
            paths = (await service.client.get("/openapi.json", headers=headers)).json()["paths"]
            seen = 0
            for path, operations in paths.items():
                if "get" in operations and path != "/flush_cache":
                    response = await service.client.get(path, headers=headers)
                    assert "sesame" not in response.text, path
                    seen += response.status_code == 200
            assert seen > 10
            wrong = await service.client.get("/server_info", headers={"authorization": "Bearer sesame9"})
            assert "sesame" not in wrong.text

    run(test())
