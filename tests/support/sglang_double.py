"""A server that answers as SGLang's does where the DSL can tell the difference from ours.

It has no /release_group and no /apply_chat_template; its streams bring all the text that came; it ignores fields that
it does not know; and where log probabilities start, it has none. Its tokens and numbers are the toy model's.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np

from gapless.runtime.model.toy import ToyKnobs, toy_entries, toy_logprobs, toy_output
from gapless.runtime.tokenizer.byte_tokenizer import ByteTokenizer

TOKENIZER = ByteTokenizer()
KNOBS = ToyKnobs()


def logprob_entries(ids: Sequence[int], start: int) -> list[list[Any]]:
    """(log probability, id, None) of ids[start:]; of the first of them there is none."""
    histories = toy_entries(np.array(ids, np.int64), np.arange(len(ids))).cumsum(dtype=np.uint64)
    values = toy_logprobs(KNOBS, histories)
    return [
        [None if i == start else float(values[i - 1][ids[i]]), ids[i], None] for i in range(start, len(ids))
    ]


class Double(ThreadingHTTPServer):
    """`requests` are (path, body) of what has come; `tokenizes`: whether there is a /tokenize."""

    daemon_threads = True

    def __init__(self, model_path: str, tokenizes: bool) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.model_path, self.tokenizes = model_path, tokenizes
        self.requests: list[tuple[str, Any]] = []
        self.url = f"http://127.0.0.1:{self.server_port}"

    def bodies(self, path: str) -> list[Any]:
        return [body for seen, body in self.requests if seen == path]


@contextmanager
def sglang_double(model_path: str = "Qwen/Qwen3-8B", *, tokenizes: bool = True) -> Iterator[Double]:
    server = Double(model_path, tokenizes)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Double

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        self.server.requests.append((self.path, None))
        if self.path == "/get_model_info":
            self._answer({"model_path": self.server.model_path, "is_generation": True})
        elif self.path == "/get_server_info":
            self._answer({"model_path": self.server.model_path, "stream_interval": 1})
        else:
            self._answer({"detail": "Not Found"}, 404)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.server.requests.append((self.path, body))
        if self.path == "/generate":
            self._generate(body)
        elif self.path == "/tokenize" and self.server.tokenizes:
            tokens = TOKENIZER.encode_batch(body["prompt"])
            self._answer({"tokens": tokens, "count": [len(ids) for ids in tokens], "max_model_len": 4096})
        else:
            self._answer({"detail": "Not Found"}, 404)

    def _generate(self, body: dict[str, Any]) -> None:
        prompts = body.get("input_ids") or body["text"]
        is_batch = isinstance(prompts, list) and not isinstance(prompts[0], int)
        batch = prompts if is_batch else [prompts]
        tokenized = [TOKENIZER.encode(p) if isinstance(p, str) else p for p in batch]
        if not all(tokenized):
            self._answer({"error": {"message": "the input is empty"}}, 400)
            return
        count = body["sampling_params"]["max_new_tokens"]
        outputs = [toy_output(KNOBS, ids, count) for ids in tokenized]
        if body.get("stream"):
            self._stream(tokenized[0], outputs[0])
            return
        answers = [_answer(ids, output) for ids, output in zip(tokenized, outputs, strict=True)]
        if body.get("return_logprob"):
            start = body.get("logprob_start_len", -1)
            for answer, ids in zip(answers, tokenized, strict=True):
                answer["meta_info"]["input_token_logprobs"] = logprob_entries(ids, start)
        self._answer(answers if is_batch else answers[0])

    def _stream(self, ids: list[int], output: list[int]) -> None:
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("connection", "close")
        self.end_headers()
        for end in range(1, len(output) + 1):
            answer = _answer(ids, output[:end], finished=end == len(output))
            self.wfile.write(f"data: {json.dumps(answer)}\n\n".encode())
        self.wfile.write(b"data: [DONE]\n\n")
        self.close_connection = True

    def _answer(self, content: Any, status: int = 200) -> None:
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


def _answer(ids: list[int], output: list[int], *, finished: bool = True) -> dict[str, Any]:
    reason = {"type": "length", "length": len(output)} if finished else None
    meta: dict[str, Any] = {"id": "1", "finish_reason": reason}
    meta |= {"prompt_tokens": len(ids), "completion_tokens": len(output), "cached_tokens": 0}
    return {"text": TOKENIZER.decode(output), "output_ids": output, "meta_info": meta}
