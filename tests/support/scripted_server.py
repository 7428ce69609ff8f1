"""A model server that answers by a script: the chunks of its streams come at stated times, and it logs when they went.

    python tests/support/scripted_server.py [--script JSON] [--model NAME]

prints `listening on http://127.0.0.1:PORT`. It speaks SGLang's /generate, OpenAI's /v1/completions and
/v1/chat/completions, and what clients ask a server about itself. A request's script is the field `script` of its body,
else the one of the command line, where a list gives each request its own, in turn. Times are seconds after the whole
request was read:

    chunks         [[at, what], ...]; what: a number of tokens, or "empty" or "role", which bring none. By default
                   all the tokens asked for, at once
    end            when the end is sent, where it is later than the last chunk
    prompt_tokens, cached_tokens, finish_reason   as they are reported; by default counted, 0 and "length"
    usage          false: the tokens are never counted to the client
    status         an error with this status instead, at the time `end`
    fail_after     after so many chunks an error event ends the stream
    drop_after     after so many chunks the connection is closed; after 0 chunks, before any byte
    hang           true: after its chunks the stream stays open
    close          true: the server closes the connection after its answer

GET /log is a list of one object a request, in the order of arrival: `path`, `body`, `authorization`, `received`,
`writes` (a list of [time, what], where the end is "end"), and `gone`, when the connection was closed before the end, or
null. Times are time.perf_counter(), which all processes of a Linux machine share. POST /log empties it.

Token i of an answer is the byte b"bcdefg"[i % 6], by its text and by its id, which is one token for the byte tokenizer.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from time import perf_counter
from typing import Any

import httptools
import orjson
import uvloop

LETTERS = b"bcdefg"
MAX_TOKENS = 1 << 20
EMPTY = ("empty", "role")
KNOWN = {
    "chunks", "end", "prompt_tokens", "cached_tokens", "finish_reason", "usage",
    "status", "fail_after", "drop_after", "hang", "close",
}  # fmt: skip
ROUTES = ("/generate", "/v1/completions", "/v1/chat/completions")


@contextmanager
def scripted_server(script: Any = None, model: str = "scripted") -> Iterator[str]:
    """Runs one in a process of its own; yields its URL."""
    options = ["--model", model, *(["--script", json.dumps(script)] if script is not None else [])]
    process = subprocess.Popen(
        [sys.executable, "-P", str(Path(__file__)), *options], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        assert line.startswith("listening on http://"), line
        yield line.split()[-1]
    finally:
        process.terminate()
        process.wait(10)
        process.stdout.close()


class Answer:
    """One request's answer, as JSON bodies in the dialect of its route."""

    def __init__(
        self, number: int, path: str, body: dict[str, Any], script: dict[str, Any], model: str
    ) -> None:
        unknown = script.keys() - KNOWN
        if unknown:
            raise ValueError(f"the script has no {', '.join(sorted(unknown))}")
        self.script, self._path, self._model, self._id = script, path, model, f"request-{number}"
        self.stream = bool(body.get("stream"))
        self.chunks: list[Any] = script.get("chunks", [[0.0, asked_tokens(body)]])
        self.end: float = script.get("end", self.chunks[-1][0] if self.chunks else 0.0)
        self.ends_later = not self.chunks or self.end > self.chunks[-1][0]
        self._finish = script.get("finish_reason", "length")
        self._usage = script.get("usage", True)
        options = body.get("stream_options") or {}
        self._final_usage = self._usage and bool(options.get("include_usage"))
        self._each_usage = self._usage and bool(options.get("continuous_usage_stats"))
        self._prompt_tokens: int = script.get("prompt_tokens", prompt_tokens(body))
        self.tokens = 0  # so far

    def chunk(self, what: int | str, last: bool) -> dict[str, Any]:
        """The event of a chunk of a stream; the last one says why it ends."""
        new = 0 if what in EMPTY else int(what)
        before, self.tokens = self.tokens, self.tokens + new
        finish = self._finish if last else None
        if self._path == "/generate":
            return self._generate(finish)
        event = self._event(self._choice(before, what == "role", finish))
        if self._each_usage:
            event["usage"] = self._counts()
        elif self._final_usage:
            event["usage"] = None
        return event

    def last_events(self) -> list[dict[str, Any]]:
        if self._path == "/generate" or not self._final_usage:
            return []
        return [{**self._event({}), "choices": [], "usage": self._counts()}]

    def whole(self) -> dict[str, Any]:
        """The answer to a request without `stream`."""
        self.tokens = sum(what for _, what in self.chunks if what not in EMPTY)
        if self._path == "/generate":
            return self._generate(self._finish)
        text = tokens(0, self.tokens).decode()
        shape = {"message": {"role": "assistant", "content": text}} if self._is_chat else {"text": text}
        event = self._event({"index": 0, **shape, "finish_reason": self._finish})
        return (
            event
            | {"object": event["object"].removesuffix(".chunk")}
            | ({"usage": self._counts()} if self._usage else {})
        )

    @property
    def _is_chat(self) -> bool:
        return self._path == "/v1/chat/completions"

    def _generate(self, finish: str | None) -> dict[str, Any]:
        ids = tokens(0, self.tokens)
        reason = None if finish is None else {"type": finish}
        meta: dict[str, Any] = {"id": self._id, "finish_reason": reason}
        if self._usage:
            meta |= {"prompt_tokens": self._prompt_tokens, "completion_tokens": self.tokens,
                     "cached_tokens": self._cached}  # fmt: skip
        return {"text": ids.decode(), "output_ids": list(ids), "meta_info": meta}

    @property
    def _cached(self) -> int:
        return int(self.script.get("cached_tokens", 0))

    def _choice(self, before: int, role: bool, finish: str | None) -> dict[str, Any]:
        text = tokens(before, self.tokens).decode()
        if not self._is_chat:
            return {"index": 0, "text": text, "logprobs": None, "finish_reason": finish}
        delta = {"role": "assistant", "content": ""} if role else {"content": text}
        return {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}

    def _event(self, choice: dict[str, Any]) -> dict[str, Any]:
        kind = "chat.completion.chunk" if self._is_chat else "text_completion"
        return {"id": self._id, "object": kind, "created": 0, "model": self._model, "choices": [choice]}

    def _counts(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": self.tokens,
            "total_tokens": self._prompt_tokens + self.tokens,
            "prompt_tokens_details": {"cached_tokens": self._cached},
        }


def tokens(first: int, end: int) -> bytes:
    """Those of an answer, as ids and as text."""
    start, count = first % len(LETTERS), end - first
    return (LETTERS * (count // len(LETTERS) + 2))[start : start + count]


def asked_tokens(body: dict[str, Any]) -> int:
    named = (body.get("sampling_params") or {}).get("max_new_tokens")
    return int(named or body.get("max_completion_tokens") or body.get("max_tokens") or 16)


def prompt_tokens(body: dict[str, Any]) -> int:
    """Ids where the prompt is ids, else bytes of its text."""
    prompt = body.get("input_ids") or body.get("text") or body.get("prompt")
    if prompt is None:
        prompt = "".join(str(message["content"]) for message in body.get("messages", []))
    return len(prompt.encode()) if isinstance(prompt, str) else len(prompt)


class Server:
    def __init__(self, script: Any, model: str) -> None:
        self.model, self.log = model, list[dict[str, Any]]()
        self._scripts: list[dict[str, Any]] = script if isinstance(script, list) else [script]

    def answer(self, path: str, body: dict[str, Any]) -> Answer:
        number = len(self.log)
        script = body.get("script") or self._scripts[number % len(self._scripts)]
        return Answer(number, path, body, script, self.model)

    def info(self, method: str, path: str) -> Any:
        """What the server says about itself; None where it has no such route."""
        if path == "/log":
            log = self.log
            if method == "POST":
                self.log = []
            return log
        about = {
            "model_path": self.model, "served_model_name": self.model, "version": "scripted", "vocab_size": 256,
            "is_generation": True, "max_total_tokens": MAX_TOKENS, "max_model_len": MAX_TOKENS, "dp_size": 1,
        }  # fmt: skip
        card = {"id": self.model, "object": "model", "created": 0, "max_model_len": MAX_TOKENS}
        return {
            "/health": {},
            "/v1/models": {"object": "list", "data": [card]},
            "/model_info": about,
            "/get_model_info": about,
            "/server_info": about,
            "/get_server_info": about,
            "/flush_cache": {"success": True, "message": "flushed"},
        }.get(path)


class Connection(asyncio.Protocol):
    """One request at a time; requests that a client sends ahead are not understood."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._loop = asyncio.get_running_loop()
        self._parser = httptools.HttpRequestParser(self)
        self._entry: dict[str, Any] | None = None  # of the answer that is being given
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        transport.set_write_buffer_limits(0)  # uvloop then writes at once, not at the end of the loop's turn

    def connection_lost(self, error: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._entry is not None:
            self._entry["gone"] = perf_counter()

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_message_begin(self) -> None:
        self._url, self._body, self._authorization = b"", bytearray(), ""

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() == b"authorization":
            self._authorization = value.decode()

    def on_body(self, piece: bytes) -> None:
        self._body += piece

    def on_message_complete(self) -> None:
        received = perf_counter()
        path = self._url.decode().partition("?")[0]
        if path in ROUTES:
            self._start(path, received)
        elif (info := self._server.info(self._parser.get_method().decode(), path)) is not None:
            self._respond(200, info)
        else:
            self._respond(404, error_body(f"no route {path}"))

    def _start(self, path: str, received: float) -> None:
        try:
            body = orjson.loads(self._body)
            self._answer = answer = self._server.answer(path, body)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            self._respond(400, error_body(f"{type(error).__name__}: {error}"))
            return
        self._received = received
        self._entry = {"path": path, "body": body, "authorization": self._authorization, "received": received,
                       "writes": [], "gone": None}  # fmt: skip
        self._server.log.append(self._entry)
        if "status" in answer.script:
            self._at(answer.script.get("end", 0.0), self._refuse)
        elif answer.stream:
            self._sent = 0
            self._next()
        elif "drop_after" in answer.script:
            self._at(answer.end, self._transport.close)
        elif not answer.script.get("hang"):
            self._at(answer.end, self._whole)

    def _at(self, seconds: float, do: Any) -> None:
        self._timer = self._loop.call_at(self._received + seconds, do)  # the loop's clock is perf_counter's

    def _next(self) -> None:
        """Plans what comes after the chunks that have been sent."""
        answer, script = self._answer, self._answer.script
        if self._sent == script.get("drop_after"):
            self._transport.close()
        elif self._sent == script.get("fail_after"):
            self._write("end", b"data: " + orjson.dumps(error_body("as scripted")) + b"\n\n", last=True)
        elif self._sent < len(answer.chunks):
            self._at(answer.chunks[self._sent][0], self._chunk)
        elif not script.get("hang"):
            self._at(answer.end, self._end)

    def _chunk(self) -> None:
        answer = self._answer
        what = answer.chunks[self._sent][1]
        self._sent += 1
        last = self._sent == len(answer.chunks) and not answer.ends_later and not answer.script.get("hang")
        self._write(what, events([answer.chunk(what, last)]))
        self._next()

    def _end(self) -> None:
        answer = self._answer
        finish = [answer.chunk("empty", last=True)] if answer.ends_later else []
        self._write("end", events([*finish, *answer.last_events()]) + b"data: [DONE]\n\n", last=True)

    def _write(self, what: int | str, data: bytes, last: bool = False) -> None:
        assert self._entry is not None
        writes = self._entry["writes"]
        head = (
            b""
            if writes
            else self._head(200, b"content-type: text/event-stream\r\ntransfer-encoding: chunked")
        )
        data = b"%b%x\r\n%b\r\n%b" % (head, len(data), data, b"0\r\n\r\n" if last else b"")
        writes.append((perf_counter(), what))
        self._transport.write(data)
        if last:
            self._finish()

    def _refuse(self) -> None:
        self._logged_answer(self._answer.script["status"], error_body("as scripted"))

    def _whole(self) -> None:
        self._logged_answer(200, self._answer.whole())

    def _logged_answer(self, status: int, content: Any) -> None:
        assert self._entry is not None
        self._entry["writes"].append((perf_counter(), "end"))
        self._respond(status, content)
        self._finish()

    def _finish(self) -> None:
        self._entry = self._timer = None
        if self._answer.script.get("close"):
            self._transport.close()

    def _respond(self, status: int, content: Any) -> None:
        data = orjson.dumps(content)
        head = self._head(status, b"content-type: application/json\r\ncontent-length: %d" % len(data))
        self._transport.write(head + data)

    def _head(self, status: int, fields: bytes) -> bytes:
        return b"HTTP/1.1 %d Scripted\r\n%b\r\n\r\n" % (status, fields)


def events(contents: list[dict[str, Any]]) -> bytes:
    return b"".join(b"data: %b\n\n" % orjson.dumps(content) for content in contents)


def error_body(message: str) -> dict[str, Any]:
    return {"error": {"message": message, "type": "server_error", "param": None, "code": "scripted"}}


async def serve(script: Any, model: str) -> None:
    server, loop = Server(script, model), asyncio.get_running_loop()
    opening = set[asyncio.Task[Any]]()
    listener = socket.create_server(("127.0.0.1", 0), backlog=4096)
    listener.setblocking(False)

    def accept() -> None:
        """All who wait. A server of uvloop's own takes one in a turn of the loop, which under load is too few."""
        with suppress(BlockingIOError):
            while True:
                connection, _ = listener.accept()
                connection.setblocking(False)
                task = loop.create_task(loop.connect_accepted_socket(lambda: Connection(server), connection))
                opening.add(task)
                task.add_done_callback(opening.discard)

    loop.add_reader(listener, accept)
    print(f"listening on http://127.0.0.1:{listener.getsockname()[1]}", flush=True)
    await loop.create_future()  # until it is killed


def main() -> None:
    parser = argparse.ArgumentParser(description="A model server that answers by a script.")
    parser.add_argument("--script", type=json.loads, default={}, help="an object, or a list of them")
    parser.add_argument("--model", default="scripted")
    parsed = parser.parse_args()
    uvloop.run(serve(parsed.script, parsed.model))


if __name__ == "__main__":
    main()
