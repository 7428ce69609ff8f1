"""The scripted server keeps to its script: what it sends, in which order, and what it says about it afterwards."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from http.client import HTTPConnection
from typing import Any

import httpx
import pytest
from scripted_server import scripted_server

CHAT, COMPLETIONS, GENERATE = "/v1/chat/completions", "/v1/completions", "/generate"
CHUNKS = [[0.0, "role"], [0.01, 2], [0.02, "empty"], [0.02, 1]]
SCRIPT = {"chunks": CHUNKS, "end": 0.03, "prompt_tokens": 7, "cached_tokens": 4, "finish_reason": "stop"}
USAGE = {
    "prompt_tokens": 7,
    "completion_tokens": 3,
    "total_tokens": 10,
    "prompt_tokens_details": {"cached_tokens": 4},
}


@pytest.fixture(scope="module")
def server() -> Iterator[httpx.Client]:
    with scripted_server() as url, httpx.Client(base_url=url, timeout=20) as client:
        yield client


@pytest.fixture
def client(server: httpx.Client) -> httpx.Client:
    """With an empty log."""
    server.post("/log")
    return server


def stream(client: httpx.Client, path: str, **body: Any) -> list[dict[str, Any]]:
    """The events of a stream, which must end as one."""
    response = client.post(path, json={"stream": True, **body})
    assert (response.status_code, response.headers["content-type"]) == (200, "text/event-stream")
    *events, done, rest = response.text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    return [json.loads(event.removeprefix("data: ")) for event in events]


def log(client: httpx.Client) -> list[dict[str, Any]]:
    return list(client.get("/log").json())


def test_a_stream_of_generate(client: httpx.Client) -> None:
    events = stream(client, GENERATE, input_ids=[1, 2], script=SCRIPT)
    assert [event["text"] for event in events] == ["", "bc", "bc", "bcd", "bcd"]
    assert [event["output_ids"] for event in events] == [list(event["text"].encode()) for event in events]
    meta = [event["meta_info"] for event in events]
    assert [m["completion_tokens"] for m in meta] == [0, 2, 2, 3, 3]
    assert [m["finish_reason"] for m in meta] == [None] * 4 + [{"type": "stop"}]
    assert {(m["prompt_tokens"], m["cached_tokens"]) for m in meta} == {(7, 4)}


def test_a_stream_of_completions(client: httpx.Client) -> None:
    options = {"include_usage": True}
    *events, last = stream(client, COMPLETIONS, prompt="a", stream_options=options, script=SCRIPT)
    choices = [event["choices"][0] for event in events]
    assert [choice["text"] for choice in choices] == ["", "bc", "", "d", ""]
    assert [choice["finish_reason"] for choice in choices] == [None] * 4 + ["stop"]
    assert (last["choices"], last["usage"]) == ([], USAGE)
    assert [event["usage"] for event in events] == [None] * 5


def test_a_stream_of_chat(client: httpx.Client) -> None:
    options = {"continuous_usage_stats": True}
    events = stream(client, CHAT, messages=[], stream_options=options, script=SCRIPT)
    deltas = [event["choices"][0]["delta"] for event in events]
    assert deltas == [
        {"role": "assistant", "content": ""},
        *({"content": text} for text in ("bc", "", "d", "")),
    ]
    assert [event["usage"]["completion_tokens"] for event in events] == [0, 2, 2, 3, 3]


def test_whole_answers(client: httpx.Client) -> None:
    generated = client.post(GENERATE, json={"text": "a", "script": SCRIPT}).json()
    assert (generated["text"], generated["meta_info"]["completion_tokens"]) == ("bcd", 3)
    completed = client.post(COMPLETIONS, json={"prompt": "a", "script": SCRIPT}).json()
    assert (completed["choices"][0]["text"], completed["usage"]) == ("bcd", USAGE)
    chat = client.post(CHAT, json={"messages": [], "script": SCRIPT}).json()
    assert chat["choices"][0]["message"] == {"role": "assistant", "content": "bcd"}
    assert [entry["writes"][0][1] for entry in log(client)] == ["end"] * 3


def test_without_usage_nothing_counts_the_tokens(client: httpx.Client) -> None:
    script = SCRIPT | {"usage": False}
    options = {"include_usage": True, "continuous_usage_stats": True}
    for path in (COMPLETIONS, CHAT):
        assert all(
            "usage" not in event for event in stream(client, path, stream_options=options, script=script)
        )
        assert "usage" not in client.post(path, json={"script": script}).json()
    for event in stream(client, GENERATE, script=script):
        assert event["meta_info"].keys() == {"id", "finish_reason"}


def test_without_a_script_all_tokens_asked_for_come_at_once(client: httpx.Client) -> None:
    generated = client.post(
        GENERATE, json={"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 8}}
    ).json()
    assert generated["text"] == "bcdefgbc"
    assert generated["meta_info"] == {
        "id": "request-0", "finish_reason": {"type": "length"},
        "prompt_tokens": 3, "completion_tokens": 8, "cached_tokens": 0,
    }  # fmt: skip
    (event,) = stream(client, COMPLETIONS, prompt="abc", max_tokens=5)
    assert event["choices"][0]["finish_reason"] == "length"


def test_the_log(client: httpx.Client) -> None:
    body = {"prompt": [1], "stream": True, "script": SCRIPT}
    client.post(COMPLETIONS, json=body, headers={"authorization": "Bearer k"})
    client.post(GENERATE, json={"text": "a"})
    first, second = log(client)
    assert (first["path"], first["body"], first["authorization"]) == (COMPLETIONS, body, "Bearer k")
    assert [what for _, what in first["writes"]] == ["role", 2, "empty", 1, "end"]
    times = [first["received"], *(at for at, _ in first["writes"]), second["received"]]
    assert times == sorted(times)
    assert (first["gone"], second["path"], second["authorization"]) == (None, GENERATE, "")


def test_a_scripted_error(client: httpx.Client) -> None:
    for streams in (True, False):
        answer = client.post(GENERATE, json={"stream": streams, "script": {"status": 503}})
        assert (answer.status_code, answer.json()["error"]["message"]) == (503, "as scripted")
    *chunks, error = client.post(
        GENERATE, json={"stream": True, "script": SCRIPT | {"fail_after": 2}}
    ).text.split("\n\n")[:-1]
    assert len(chunks) == 2
    assert json.loads(error.removeprefix("data: "))["error"]["message"] == "as scripted"


@pytest.mark.parametrize("chunks", [0, 2, 4])
def test_a_connection_that_is_dropped(client: httpx.Client, chunks: int) -> None:
    events = []
    body = {"stream": True, "script": SCRIPT | {"drop_after": chunks}}
    with pytest.raises(httpx.RemoteProtocolError), client.stream("POST", GENERATE, json=body) as response:
        for line in filter(None, response.iter_lines()):
            events.append(line)
    assert len(events) == chunks
    (entry,) = log(client)
    assert [what for _, what in entry["writes"]] == ["role", 2, "empty", 1][:chunks]
    assert entry["gone"] > entry["received"]


def test_a_stream_that_never_ends_and_a_client_that_goes(client: httpx.Client) -> None:
    body = {"stream": True, "script": {"chunks": [[0.0, 1], [0.0, 1]], "hang": True}}
    with client.stream("POST", GENERATE, json=body) as response:
        lines = filter(None, response.iter_lines())
        events = [json.loads(next(lines).removeprefix("data: ")) for _ in range(2)]
    assert [event["text"] for event in events] == ["b", "bc"]
    assert events[-1]["meta_info"]["finish_reason"] is None
    deadline = time.monotonic() + 20
    while (entry := log(client)[0])["gone"] is None:
        assert time.monotonic() < deadline
    assert entry["gone"] > entry["writes"][-1][0]


def test_scripts_of_the_command_line_are_taken_in_turn() -> None:
    scripts = [{"chunks": [[0, n]]} for n in (1, 2)]
    with scripted_server(scripts) as url:
        seen = [httpx.post(url + GENERATE, json={}).json()["text"] for _ in range(3)]
    assert seen == ["b", "bc", "b"]


def test_a_connection_that_is_not_kept(client: httpx.Client) -> None:
    connection = HTTPConnection(client.base_url.host, client.base_url.port or 0, timeout=20)
    connection.request("POST", GENERATE, json.dumps({"script": {"close": True}}))
    assert json.loads(connection.getresponse().read())["text"] == "bcdefgbcdefgbcde"
    assert connection.sock.recv(1) == b""
    connection.close()


def test_what_the_server_says_about_itself(client: httpx.Client) -> None:
    assert client.get("/health").status_code == 200
    assert client.get("/v1/models").json()["data"][0]["id"] == "scripted"
    for path in ("/model_info", "/get_model_info", "/server_info", "/get_server_info"):
        assert client.get(path).json()["model_path"] == "scripted"
    assert client.post("/flush_cache").json()["success"] is True
    assert client.get("/nothing").status_code == 404
    assert log(client) == []


def test_a_wrong_script_is_named(client: httpx.Client) -> None:
    answer = client.post(GENERATE, json={"script": {"chunk": []}})
    assert (answer.status_code, answer.json()["error"]["message"]) == (
        400,
        "ValueError: the script has no chunk",
    )
    assert client.post(GENERATE, content=b"{").status_code == 400
