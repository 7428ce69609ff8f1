"""What /openapi.json allows, and what it does not, sent to the real server: it answers all, and never by a 5xx."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error

OPTIONS = (
    "--context-length=64",
    "--max-batch-requests=8",
    "--max-body-bytes=65536",
    "--grammar-backend=none",
    "--chat-template=chatml",
)
TAKEN = (
    "/generate",
    "/tokenize",
    "/detokenize",
    "/abort_request",
    "/release_group",
    "/apply_chat_template",
    "/v1/completions",
    "/v1/chat/completions",
)
# What no schema says, and where most cases would end: which of two fields is needed, and the names of this server.
GIVEN: dict[str, dict[str, Any]] = {
    "/apply_chat_template": {"messages": [{"role": "user", "content": "ab"}]},
    "/generate": {"text": "ab", "input_ids": None},
    "/v1/completions": {"model": "toy"},
    "/v1/chat/completions": {
        "model": "toy",
        "messages": [{"role": "user", "content": "ab"}],
        "tools": None,
        "tool_choice": None,
    },
}
Seen = Counter[tuple[str, bool]]  # (path, whether the case was accepted)


@pytest.mark.parametrize("cases", [200, pytest.param(5000, marks=pytest.mark.slow)])
def test_no_case_is_a_5xx(serve: Any, cases: int) -> None:
    """Most cases go to the routes that take a body: of the shape that is described, and of others."""
    server = serve(*OPTIONS)
    document = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    operations = [result.ok() for result in document.get_all_operations()]
    with_body = [operation for operation in operations if operation.body]
    seen: Seen = Counter()
    for operation in operations:
        if operation not in with_body:
            send(server.url, operation, GenerationMode.POSITIVE, 2, seen)
    for operation in with_body:
        for mode in GenerationMode:
            send(server.url, operation, mode, cases // (2 * len(with_body)), seen)
        assert seen[operation.path, False], f"no case of {operation.path} was refused: {seen}"
    assert all(seen[path, True] for path in TAKEN), f"no case of one of them was accepted: {seen}"
    assert seen.total() >= cases


def send(url: str, operation: Any, mode: GenerationMode, count: int, seen: Seen) -> None:
    """Sends `count` cases and checks each answer."""

    @settings(
        max_examples=count,
        deadline=None,
        database=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(generation_mode=mode))
    def check(case: schemathesis.Case) -> None:
        if mode is GenerationMode.POSITIVE:
            case.body = case.body | GIVEN.get(operation.path, {}) if operation.body else case.body
        response = case.call(base_url=url)
        seen[operation.path, response.status_code < 400] += 1
        case.validate_response(response, checks=[not_a_server_error])

    check()
