"""llguidance's grammars in the scheduler: masks over the model's rows, ends, faults, and runs of the toy model."""

from __future__ import annotations

import json
import re
import threading
from typing import Any

import jsonschema
import numpy as np
import pytest
from differential import Runner
from grammars import byte_vocabulary
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher

from gapless.runtime.core.config import ServerConfig
from gapless.runtime.core.errors import RequestError
from gapless.runtime.core.grammar_text import to_lark
from gapless.runtime.core.messages import Finish, Submit, column
from gapless.runtime.core.sampling import SamplingParams
from gapless.runtime.scheduler import grammar_matcher as module
from gapless.runtime.scheduler.grammar import Grammar, GrammarComplete
from gapless.runtime.scheduler.grammar_matcher import Grammars
from gapless.runtime.tokenizer.byte_tokenizer import ByteTokenizer

END = 256
LONG = 30.0  # seconds that a busy machine may take
PROMPT = [(11 * i) % 250 for i in range(30)]
PIECES = ByteTokenizer().pieces
POINT = {
    "type": "object",
    "properties": {"x": {"type": "integer", "minimum": 0, "maximum": 99}, "on": {"type": "boolean"}},
    "required": ["x", "on"],
    "additionalProperties": False,
}
TEXTS = {
    "pattern": to_lark("regex", "(ab|cd)+e"),
    "long": to_lark("regex", "[a-c]{3,40}(é|漢)+"),
    "schema": to_lark("json_schema", json.dumps(POINT)),
    "recursive": to_lark("ebnf", 'root ::= "(" root ")" | [0-9]{1,3} | "the "'),
}


def make_one(lark: str, vocab_size: int = 512, stop_ids: tuple[int, ...] = (END,)) -> Grammar:
    grammars = Grammars(byte_vocabulary(), vocab_size)
    grammar = grammars.make(Submit(1, column([1], "<i4"), SamplingParams(), stop_ids, 0, grammar=lark))
    assert grammar is not None
    return grammar


def may_come(grammar: Grammar) -> set[int]:
    mask = grammar.mask(LONG)
    assert mask is not None
    return set(np.unpackbits(mask.view(np.uint8), bitorder="little").nonzero()[0].tolist())


def feed(grammar: Grammar, text: bytes) -> Grammar:
    for byte in text:
        assert byte in may_come(grammar)
        grammar.accept(byte)
    return grammar


@pytest.mark.parametrize("vocab_size", [200, 257, 500, 512, 513, 600, 1000])
def test_a_mask_covers_the_models_rows_whatever_the_tokenizer_has(vocab_size: int) -> None:
    """Rows beyond the tokenizer's ids have no text, and its ids beyond the rows do not exist."""
    grammar = make_one(to_lark("regex", "(?s:.)*"), vocab_size)
    mask = grammar.mask(LONG)
    assert mask is not None
    assert (mask.dtype, len(mask)) == (np.int32, -(-vocab_size // 32))
    ids = may_come(grammar)
    assert max(ids) < min(vocab_size, 512)
    assert (END in ids) == (vocab_size > END)
    assert ord("a") in ids


def test_all_spellings_of_a_text_may_come() -> None:
    """Among the byte tokenizer's ids are "th" and "the"."""
    spellings = {PIECES.piece(token) for token in may_come(make_one(to_lark("regex", "the")))}
    assert spellings == {b"t", b"th", b"the"}


def test_special_ids_stand_for_no_text() -> None:
    grammar = make_one(to_lark("regex", "<eos>|<300>"), stop_ids=())
    assert {PIECES.piece(token) for token in may_come(grammar)} == {b"<", b"<300>"}


def test_ids_that_end_the_request_may_come_where_the_output_may_end() -> None:
    grammar = make_one(to_lark("regex", "a+"), stop_ids=(10, END))
    assert may_come(grammar) == {97}
    assert may_come(feed(grammar, b"a")) == {97, 10, END}
    ignoring = make_one(to_lark("regex", "a+"), stop_ids=())
    assert may_come(feed(ignoring, b"aa")) == {97}


@pytest.mark.parametrize("stop_ids", [(), (END,), (END, 97)])
def test_an_output_that_cannot_go_on_has_ended(stop_ids: tuple[int, ...]) -> None:
    with pytest.raises(GrammarComplete):
        feed(make_one(to_lark("regex", "abc"), stop_ids=stop_ids), b"abc").mask(LONG)


def test_a_mask_stays_the_same_until_a_token_is_decided() -> None:
    grammar = make_one(to_lark("regex", "a[bc]"))
    assert may_come(grammar) == may_come(grammar) == {97}
    grammar.accept(97)
    assert may_come(grammar) == may_come(grammar) == {98, 99}


def test_where_no_token_fits_the_grammar_fails() -> None:
    with pytest.raises(RequestError, match="no token of the vocabulary"):
        make_one(to_lark("regex", "é"), vocab_size=100, stop_ids=()).mask(LONG)


def test_a_grammar_that_was_not_checked_fails_when_its_mask_is_needed() -> None:
    with pytest.raises(RequestError, match="invalid regex"):
        make_one(to_lark("regex", "[")).mask(LONG)


def test_a_token_that_does_not_fit_fails() -> None:
    grammar = make_one(to_lark("regex", "ab"))
    assert may_come(grammar) == {97}
    grammar.accept(120)
    with pytest.raises(RequestError):
        grammar.mask(LONG)


def test_the_same_grammar_is_compiled_once_and_each_request_has_its_own_state(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compiled: list[str] = []

    def compile_one(tokenizer: Any, lark: str, **options: Any) -> LLMatcher:
        compiled.append(lark)
        return LLMatcher(tokenizer, lark, **options)

    monkeypatch.setattr(module, "LLMatcher", compile_one)
    monkeypatch.setattr(module, "MAX_COMPILED", 2)
    grammars = Grammars(byte_vocabulary(), 512)

    def one(regex: str) -> Grammar:
        made = grammars.make(Submit(1, b"", SamplingParams(), (), 0, grammar=to_lark("regex", regex)))
        assert made is not None
        return made

    first, second = one("a[bc]d"), one("a[bc]d")
    feed(first, b"ab")
    assert may_come(second) == {97}
    assert may_come(feed(one("a[bc]d"), b"ac")) == {100}
    assert len(compiled) == 1
    for regex in ("x", "y", "a[bc]d"):  # the third is gone when it comes again
        may_come(one(regex))
    assert len(compiled) == 4
    monkeypatch.setattr(module, "MAX_COMPILED_CHARS", 100)
    for _ in range(2):
        assert may_come(one("z" * 100)) == {122}  # too long to be kept
    assert len(compiled) == 6
    assert (grammars._chars, len(grammars._compiled)) == (0, 0)


def test_a_mask_that_is_late_is_waited_for_without_end_but_with_a_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    release = threading.Event()
    monkeypatch.setattr(module, "mask_of", lambda matcher: release.wait(LONG) and np.full(17, -1, np.int32))
    grammar = make_one(to_lark("regex", "a"))
    assert grammar.mask(0.0) is None
    assert grammar.mask(0.001) is None
    monkeypatch.setattr(module, "LATE_S", 0.0)
    with pytest.raises(Exception, match="has computed for"):
        grammar.mask(0.0)
    release.set()
    assert grammar.mask(LONG) is not None


# ---------------------------------------------------------------- whole runs


def make(**options: Any) -> Runner:
    defaults = {"model_path": "toy", "page_size": 4, "max_running_requests": 8, "context_length": 256}
    config = ServerConfig(**defaults | options)
    vocab_size = 512
    return Runner(config, make_grammar=Grammars(byte_vocabulary(), vocab_size).make)


def text_of(ids: list[int]) -> str:
    return PIECES.decode(ids)


def check(name: str, ids: list[int], finish: Finish) -> None:
    """What came matches, or is the beginning of what does."""
    matcher = LLMatcher(byte_vocabulary(), TEXTS[name], log_level=0)
    stopped = finish == Finish.STOP_TOKEN
    body = ids[:-1] if stopped and ids[-1] == END else ids
    assert matcher.consume_tokens(body), (name, text_of(ids))
    if not stopped:
        return
    text = text_of(body)
    if name == "pattern":
        assert re.fullmatch("(ab|cd)+e", text)
    elif name == "long":
        assert re.fullmatch("[a-c]{3,40}(é|漢)+", text)
    elif name == "schema":
        jsonschema.validate(json.loads(text), POINT)
    else:
        assert re.fullmatch(r"\(*([0-9]{1,3}|the )\)*", text)
        assert text.count("(") == text.count(")")


@settings(max_examples=40, deadline=None)
@given(
    data=st.data(),
    no_overlap=st.booleans(),
    steps=st.sampled_from([1, 4]),
    pool=st.sampled_from([96, 2048]),
    chunk=st.sampled_from([3, 64]),
    names=st.lists(st.sampled_from(["", *TEXTS]), min_size=1, max_size=7),
)
def test_every_output_matches_and_neighbours_are_as_if_alone(
    data: st.DataObject, no_overlap: bool, steps: int, pool: int, chunk: int, names: list[str]
) -> None:
    runner = make(
        disable_overlap_schedule=no_overlap,
        num_scheduler_steps=steps,
        max_total_tokens=pool,
        chunked_prefill_size=chunk,
    )
    aborted = data.draw(st.none() | st.integers(1, len(names)))
    for uid, name in enumerate(names, 1):
        runner.submit(uid, PROMPT[: 3 * uid], 40, (END,), grammar=TEXTS.get(name, ""))
        if uid == aborted and data.draw(st.booleans()):
            runner.abort(uid)  # perhaps while it compiles
        for _ in range(data.draw(st.integers(0, 3))):
            runner.turn()
    if aborted:
        runner.abort(aborted)
    runner.finish()
    for uid, name in enumerate(names, 1):
        seen = runner.seen[uid]
        if name:
            assert seen.finish in (Finish.STOP_TOKEN, Finish.LENGTH, *[Finish.ABORT] * (uid == aborted))
            check(name, seen.ids, seen.finish)
        elif seen.finish == Finish.ABORT:
            assert seen.ids == runner.expected(PROMPT[: 3 * uid], 40, (END,))[: len(seen.ids)]
        else:
            assert seen.ids == runner.expected(PROMPT[: 3 * uid], 40, (END,))


@pytest.mark.parametrize("no_overlap", [False, True])
def test_a_run_gives_the_same_ids_with_and_without_overlap_and_preemption(no_overlap: bool) -> None:
    """The toy model picks the first id that is allowed at or after the hash of the history."""
    outputs = []
    for pool in (80, 2048):
        runner = make(disable_overlap_schedule=no_overlap, max_total_tokens=pool)
        for uid, name in enumerate(["long", "", "long", "pattern", "long"], 1):
            runner.submit(uid, PROMPT[:uid], 60, (END,), grammar=TEXTS.get(name, ""))
        runner.finish()
        outputs.append([seen.ids for seen in runner.seen.values()])
        assert pool > 80 or any(runner.preemptions[uid] for uid in (1, 3, 5)), (
            "no constrained row was preempted"
        )
    assert outputs[0] == outputs[1]
    reference = make(disable_overlap_schedule=True)
    for uid, name in enumerate(["long", "", "long", "pattern", "long"], 1):
        reference.submit(uid, PROMPT[:uid], 60, (END,), grammar=TEXTS.get(name, ""))
        reference.finish()
    assert outputs[0] == [seen.ids for seen in reference.seen.values()]


@pytest.mark.parametrize("no_overlap", [False, True])
def test_a_grammar_that_fails_at_run_time_ends_its_request_alone(no_overlap: bool) -> None:
    """Its automaton outgrows llguidance's limits after some tokens."""
    runner = make(disable_overlap_schedule=no_overlap)
    bomb = to_lark("regex", "((((a{1,100}){1,100}){1,100}){1,100}){1,100}")
    runner.submit(1, PROMPT, 100, grammar=bomb)
    runner.submit(2, PROMPT, 60, (END,))
    runner.submit(3, PROMPT, 60, (END,), grammar=TEXTS["pattern"])
    runner.finish()
    assert runner.seen[1].finish == Finish.FAILED
    assert "too many expressions" in runner.seen[1].message
    assert set(runner.seen[1].ids) == {97}
    assert runner.seen[2].ids == runner.expected(PROMPT, 60, (END,))
    check("pattern", runner.seen[3].ids, runner.seen[3].finish)


def test_samples_of_one_prompt_have_a_state_each() -> None:
    runner = make()
    for uid in (1, 2, 3):
        runner.submit(uid, PROMPT, 30, (END,), grammar=TEXTS["pattern"], leader=-1 if uid == 1 else 1)
    runner.finish()
    assert runner.seen[1].ids == runner.seen[2].ids == runner.seen[3].ids
    check("pattern", runner.seen[1].ids, runner.seen[1].finish)


def test_free_rows_are_in_every_step_while_a_grammar_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()
    compile_now = module.mask_of
    monkeypatch.setattr(module, "mask_of", lambda matcher: release.wait(LONG) and compile_now(matcher))
    runner = make()
    runner.submit(1, PROMPT, 20, (END,), grammar=TEXTS["pattern"])
    runner.submit(2, PROMPT, 40)
    while not runner.seen[2].finish:
        runner.turn()
    assert not runner.seen[1].ids
    assert runner.seen[2].ids == runner.expected(PROMPT, 40)
    slot = runner.seen[2].slot
    steps = [slot in plan.slots for plan in runner.plans]
    assert all(steps[steps.index(True) : len(steps) - steps[::-1].index(True)]), "the free row sat out"
    runner.submit(3, PROMPT, 20, (END,), grammar=TEXTS["schema"])
    runner.turn()
    runner.abort(3)
    release.set()
    runner.finish()
    check("pattern", runner.seen[1].ids, runner.seen[1].finish)
    assert runner.seen[3].finish == Finish.ABORT
