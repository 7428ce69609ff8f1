"""select through each backend, against the toy model's log probabilities worked out from the whole texts' tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any

import pytest
from sglang_double import TOKENIZER, logprob_entries, sglang_double

from gapless import Engine
from gapless.frontend.backends.base import Backend, BackendError, Hint, Prompt, Selected
from gapless.frontend.backends.endpoint import RuntimeEndpoint
from gapless.frontend.backends.engine import EngineBackend
from gapless.frontend.backends.select import METHODS, Tail, selected, shared_tokens

LENGTH, GREEDY, UNCONDITIONAL = METHODS
PROMPT = "Which one is it? I think that it is"
CASES = [
    (PROMPT, [" yes", " no", " maybe so"]),
    (PROMPT, [" an apple", " a pear", " nothing"]),  # " a" is one token
    (PROMPT + " ", ["an apple", "a pear", "nothing"]),
    (PROMPT + " ", ["thing", "then", "t"]),
    (PROMPT + " t", ["hing", "hen", ""]),  # "th" and "the" begin before the border
    (PROMPT, [" a", " ab", " abc", " ab"]),
    (PROMPT, ["", " no"]),
    (PROMPT + "   ", [" x", "y"]),  # four spaces are one token
    ("xt", ["ha", "he", "x"]),
    (PROMPT, ["é", "è", "日本", "月"]),
]
Run = Callable[[Callable[[Backend], Awaitable[Any]]], Any]


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine("toy") as engine:
        yield engine


@pytest.fixture(params=["engine", "server that tokenizes", "server that does not"])
def run(request: pytest.FixtureRequest, engine: Engine) -> Iterator[Run]:
    """Runs a coroutine on a backend."""

    def on(make: Callable[[], Backend]) -> Run:
        async def bounded(call: Callable[[Backend], Awaitable[Any]]) -> Any:
            backend = make()
            try:
                return await asyncio.wait_for(call(backend), 60)
            finally:
                await backend.close()

        return lambda call: asyncio.run(bounded(call))

    if request.param == "engine":
        yield on(lambda: EngineBackend(engine))
        return
    with sglang_double(tokenizes=request.param == "server that tokenizes") as server:
        yield on(lambda: RuntimeEndpoint(server.url))


def stated(prompt: str, choices: Sequence[str], method: str) -> Selected:
    """By the definition: what follows the tokens that the whole texts share."""
    texts = [TOKENIZER.encode(prompt + choice) for choice in choices]
    start = shared_tokens(texts)
    tails = []
    for text in texts:
        given = [entry[0] for entry in logprob_entries(text, start - 1)[1:]]
        alone = [entry[0] or 0.0 for entry in logprob_entries(text[start:], 0)]
        tails.append(Tail(tuple(text[start:]), tuple(given), tuple(alone)))
    return selected(choices, tails, method, {})


def scores(run: Run, prompt: str, choices: Sequence[str], method: str) -> Selected:
    found: Selected = run(lambda backend: backend.select(Prompt(prompt), choices, method, Hint()))
    return found


@pytest.mark.parametrize("method", METHODS)
def test_each_choice_is_scored_from_the_last_token_that_all_share(run: Run, method: str) -> None:
    for prompt, choices in CASES:
        want = stated(prompt, choices, method)
        found = scores(run, prompt, choices, method)
        assert found.index == want.index, (prompt, choices)
        assert found.choice == choices[want.index]
        assert found.scores == pytest.approx(want.scores, rel=1e-5), (prompt, choices)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    "words", [["Hello", "Hi", "Good day"], ["apple", "a", "an"], ["there", "then", "Hello"]]
)
def test_a_space_may_be_the_prompts_or_the_choices(run: Run, method: str, words: list[str]) -> None:
    """The whole texts are the same, and so are the scores."""
    before = scores(run, PROMPT, [" " + word for word in words], method)
    after = scores(run, PROMPT + " ", words, method)
    assert before.index == after.index
    assert before.scores == after.scores


def test_an_option_with_a_space_and_the_same_without(run: Run) -> None:
    for prompt in ("Say: ", "Say:"):
        assert (
            scores(run, prompt, ["Hello", " Hello"], LENGTH).index
            == stated(prompt, ["Hello", " Hello"], LENGTH).index
        )


def test_nothing_before_the_choices(run: Run) -> None:
    for prompt, choices in (("", ["yes", "no"]), ("t", ["he", "x"])):
        with pytest.raises(BackendError, match="text before the choices"):
            scores(run, prompt, choices, LENGTH)


def test_an_unknown_method_and_no_choices_are_refused_at_once(run: Run) -> None:
    with pytest.raises(BackendError, match="'fastest'"):
        scores(run, PROMPT, ["a", "b"], "fastest")
    with pytest.raises(BackendError, match="needs choices"):
        scores(run, PROMPT, [], LENGTH)


def test_one_choice_needs_no_request() -> None:
    with sglang_double() as server:
        backend = RuntimeEndpoint(server.url)
        found = asyncio.run(backend.select(Prompt(PROMPT), ["yes"], LENGTH, Hint()))
        assert (found.index, found.choice) == (0, "yes")
        assert server.requests == []


def test_the_prompt_is_computed_once_and_the_choices_in_one_request(engine: Engine) -> None:
    """Each choice finds the whole pages of what all share; the group is told with each request."""
    seen: list[dict[str, Any]] = []

    class Watching(EngineBackend):
        async def _call(self, fields: Any) -> Any:
            seen.append(dict(fields))
            return await super()._call(fields)

    backend, text = Watching(engine), "a long prompt of its own, which nobody has sent before: " * 4
    found = asyncio.run(backend.select(Prompt(text), [" yes", " no", " no idea"], LENGTH, Hint("few shots")))
    first, second = seen
    assert first["sampling_params"] == second["sampling_params"] == {"max_new_tokens": 0}
    assert first["group_id"] == second["group_id"] == "few shots"
    shared = len(first["input_ids"])
    assert [ids[:shared] for ids in second["input_ids"]] == [first["input_ids"]] * 3
    assert found.meta["cached_tokens"] >= 3 * ((shared - 2) // 16 * 16)
    assert found.meta["prompt_tokens"] == sum(
        len(TOKENIZER.encode(text + c)) for c in (" yes", " no", " no idea")
    )
