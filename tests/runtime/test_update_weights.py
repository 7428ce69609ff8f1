"""Other weights are taken at rest, and nothing that the old ones computed is used again."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from gapless import Engine
from gapless.runtime.core.errors import RequestError
from gapless.runtime.model.toy import ToyKnobs, toy_output

PROMPT = [(7 * i) % 250 for i in range(40)]
PARAMS = {"max_new_tokens": 8, "ignore_eos": True}


def update(server: Any, **body: Any) -> httpx.Response:
    return httpx.post(f"{server.url}/update_weights_from_disk", json=body, timeout=60)


def answer(server: Any) -> tuple[list[int], int]:
    body = server.generate(input_ids=PROMPT, sampling_params=PARAMS).json()
    return body["output_ids"], body["meta_info"]["cached_tokens"]


def ids_of(seed: int) -> list[int]:
    return toy_output(ToyKnobs(seed=seed), PROMPT, 8)


@pytest.mark.parametrize("options", [(), ("--disable-overlap-schedule",)])
def test_other_weights_give_other_ids_and_match_no_old_prefix(serve, options: tuple[str, ...]) -> None:
    server = serve(*options)
    assert answer(server) == (ids_of(0), 0)
    assert answer(server) == (ids_of(0), 32)
    updated = update(server, model_path="toy:seed=7")
    assert (updated.status_code, updated.json()["success"]) == (200, True)
    assert answer(server) == (ids_of(7), 0)
    assert answer(server) == (ids_of(7), 32)
    assert update(server, model_path="toy").status_code == 200
    assert answer(server) == (ids_of(0), 0)


def test_weights_that_cannot_be_taken_leave_the_old_ones(serve) -> None:
    server = serve()
    answer(server)
    for path in ("nowhere", "toy:seed=x", "toy:color=1"):
        refused = update(server, model_path=path)
        assert refused.status_code == 400, refused.text
        assert refused.json()["error"]["param"] == "model_path"
    assert update(server).status_code == 400
    assert update(server, model_path="toy", timeout=-1).status_code == 400
    assert answer(server) == (ids_of(0), 32), "and their prefixes"


def test_open_requests_end_first_and_new_ones_are_refused_meanwhile(serve) -> None:
    server = serve("--toy=delay_ms=10")
    stream = server.stream(input_ids=PROMPT, sampling_params={"max_new_tokens": 200, "ignore_eos": True})
    stream.wait_first()
    assert update(server, model_path="toy:seed=7", timeout=0).status_code == 409, "nobody may wait"
    with ThreadPoolExecutor(1) as pool:
        updating = pool.submit(update, server, model_path="toy:seed=7")
        server.wait_health(503)
        refused = server.generate(input_ids=PROMPT, sampling_params=PARAMS)
        assert (refused.status_code, "retry-after" in refused.headers) == (503, True)
        assert updating.result(60).status_code == 200
    stream.wait_end()
    assert stream.events[-1]["output_ids"] == toy_output(ToyKnobs(), PROMPT, 200)
    assert answer(server) == (ids_of(7), 0)


def test_two_updates_at_once_are_both_answered(serve) -> None:
    server = serve()
    with ThreadPoolExecutor(4) as pool:
        codes = [pool.submit(update, server, model_path=f"toy:seed={seed}") for seed in (3, 4, 3, 4)]
        assert all(code.result(60).status_code in (200, 503) for code in codes)
    assert answer(server)[0] in (ids_of(3), ids_of(4))


def test_the_offline_engine_does_the_same() -> None:
    with Engine(model_path="toy") as engine:
        assert engine.update_weights_from_disk("toy:seed=7")
        assert engine.generate(input_ids=PROMPT, sampling_params=PARAMS)["output_ids"] == ids_of(7)
        with pytest.raises(RequestError, match="no toy model"):
            engine.update_weights_from_disk("demo")
