"""What is learnt of a server from routes that answer in their own ways."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import orjson
import pytest

from gapless.bench.serve.server import Facts, ServerError, probe
from gapless.runtime.core.http_client import HttpClient, Response


class Routes:
    """A client whose server answers with these values, and 404 elsewhere."""

    def __init__(self, routes: dict[str, Any]) -> None:
        self._routes = routes

    async def request(self, method: str, path: str, **_: Any) -> Response:
        answer = self._routes.get(path, Response(404, {}, b""))
        return answer if isinstance(answer, Response) else Response(200, {}, orjson.dumps(answer))


def probed(backend: str = "gapless", model: str | None = None, **routes: Any) -> Facts:
    client = Routes({f"/{name}".replace("v1_", "v1/"): answer for name, answer in routes.items()})
    return asyncio.run(probe(cast(HttpClient, client), backend, model))


def test_a_model_may_have_slashes_in_its_name() -> None:
    facts = probed("vllm", "org/model", v1_models={"data": [{"id": "org/model", "root": "org/other"}]})
    assert (facts.model, facts.model_path) == ("org/model", "org/other")


@pytest.mark.parametrize(
    "models",
    [
        {"data": None},
        {"data": 5},
        {"data": [5, {"id": None}]},
        {"data": [{"root": 5}]},
        [],
        Response(200, {}, b"\xff"),
        Response(500, {}, b"{}"),
    ],
)
def test_a_list_of_models_that_is_none_says_nothing(models: Any) -> None:
    with pytest.raises(ServerError, match="give --model"):
        probed("openai", v1_models=models)
    assert probed("openai", "m", v1_models=models).model == "m"


@pytest.mark.parametrize("size", ["256", None, 0, -1, 2.5])
def test_a_vocabulary_whose_size_is_no_number_is_the_tokenizers(size: Any) -> None:
    assert probed(model_info={"model_path": "toy", "vocab_size": size}).vocab_size is None


def test_a_redirect_says_where_to() -> None:
    away = Response(308, {"location": "https://there/v1/models"}, b"")
    with pytest.raises(ServerError, match=r"308 .*it is at https://there/v1/models"):
        probed(v1_models=away)
