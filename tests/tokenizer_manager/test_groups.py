"""group_id and hold_prefix of /generate, and /release_group."""

from __future__ import annotations

from typing import Any

import pytest

from gapless.runtime.core.messages import Fatal, ReleaseGroup, Submit


def submits(service: Any) -> list[Submit]:
    return [message for message in service.engine.sent if isinstance(message, Submit)]


@pytest.mark.parametrize(
    ("fields", "want"),
    [
        ({}, [("", False)] * 2),
        ({"group_id": "g"}, [("g", False)] * 2),
        ({"group_id": "g", "hold_prefix": True}, [("g", True)] * 2),
        ({"group_id": ["g", None], "hold_prefix": [True, None]}, [("g", True), ("", False)]),
        ({"group_id": ["g", "h"], "hold_prefix": [False, True]}, [("g", False), ("h", True)]),
    ],
)
def test_one_for_all_prompts_or_one_each(
    run: Any, in_process: Any, fields: dict[str, Any], want: list[tuple[str, bool]]
) -> None:
    async def test() -> None:
        async with in_process() as service:
            response = await service.generate(text=["a", "b"], **fields)
            assert response.status_code == 200
            assert [(submit.group, submit.hold) for submit in submits(service)] == want

    run(test())


def test_of_several_samples_the_first_holds(run: Any, in_process: Any) -> None:
    async def test() -> None:
        async with in_process() as service:
            await service.generate(text="a", sampling_params={"n": 3}, group_id="g", hold_prefix=True)
            assert [(s.group, s.hold) for s in submits(service)] == [("g", True), ("g", False), ("g", False)]

    run(test())


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"group_id": 5}, "group_id"),
        ({"group_id": ["g", 5]}, "group_id[1]"),
        ({"group_id": ["g"]}, "group_id"),
        ({"group_id": "x" * 257}, "group_id"),
        ({"group_id": "g", "hold_prefix": 1}, "hold_prefix"),
        ({"group_id": "g", "hold_prefix": [True]}, "hold_prefix"),
        ({"group_id": "g", "hold_prefix": [True, "no"]}, "hold_prefix[1]"),
        ({"hold_prefix": True}, "hold_prefix"),
        ({"group_id": ["g", ""], "hold_prefix": True}, "hold_prefix"),
        ({"group_id": ["g", None], "hold_prefix": [True, True]}, "hold_prefix[1]"),
    ],
)
def test_a_wrong_value_is_400_and_named(
    run: Any, in_process: Any, fields: dict[str, Any], param: str
) -> None:
    async def test() -> None:
        async with in_process() as service:
            response = await service.generate(text=["a", "b"], **fields)
            error = response.json()["error"]
            assert (response.status_code, error["code"], error["param"]) == (400, "invalid_value", param)
            assert service.engine.sent == []

    run(test())


def test_a_release_reaches_the_scheduler_after_what_was_sent_before(run: Any, in_process: Any) -> None:
    async def test() -> None:
        async with in_process() as service:
            await service.generate(text="a", group_id="g", hold_prefix=True)
            for name in ("g", "g", "never heard of"):
                response = await service.client.post("/release_group", json={"group_id": name})
                assert (response.status_code, response.json()) == (200, {"success": True})
            kinds = [type(message) for message in service.engine.sent]
            assert kinds == [Submit, ReleaseGroup, ReleaseGroup, ReleaseGroup]
            assert [message.group for message in service.engine.sent[1:]] == ["g", "g", "never heard of"]

    run(test())


@pytest.mark.parametrize("body", [{}, {"group_id": ""}, {"group_id": 5}, {"group_id": "x" * 257}])
def test_a_wrong_release_is_400(run: Any, in_process: Any, body: dict[str, Any]) -> None:
    async def test() -> None:
        async with in_process() as service:
            response = await service.client.post("/release_group", json=body)
            assert (response.status_code, response.json()["error"]["code"]) == (400, "invalid_value")
            assert service.engine.sent == []

    run(test())


def test_without_an_engine_it_is_503(run: Any, in_process: Any) -> None:
    async def test() -> None:
        async with in_process(loaded=False) as service:
            assert (await service.client.post("/release_group", json={"group_id": "g"})).status_code == 503
        async with in_process() as service:
            service.front.handle(Fatal("the device hung"))
            assert (await service.client.post("/release_group", json={"group_id": "g"})).status_code == 503
            assert service.engine.sent == []

    run(test())
