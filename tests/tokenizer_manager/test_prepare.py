"""What the scheduler gets for a prompt."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gapless.runtime.core.errors import RequestError
from gapless.runtime.core.messages import Ready, Submit, int32s
from gapless.runtime.core.random import uniform
from gapless.runtime.core.sampling import SamplingParams
from gapless.runtime.tokenizer.byte_tokenizer import EOS_ID, ByteTokenizer
from gapless.tokenizer_manager.prepare import prepare, sample_seeds
from gapless.tokenizer_manager.schema import Prompt

VOCAB, CONTEXT = 600, 64
READY = Ready(VOCAB, CONTEXT, 500, 60, (599,), 0.0, {})


def submit(
    text: str | None = None, ids: list[Any] | None = None, ready: Ready = READY, **params: Any
) -> Submit:
    (message,) = submits(text, ids, ready, [(7, 11)], **params)
    return message


def submits(
    text: str | None, ids: list[Any] | None, ready: Ready, samples: list[tuple[int, int]], **params: Any
) -> list[Submit]:
    field = "text" if ids is None else "input_ids"
    prompt = Prompt(text, ids, SamplingParams.parse(params), "rid", ("rid",), "key", "salt", 3, field=field)
    return prepare(prompt, samples, ByteTokenizer(), ready)


def test_text_becomes_ids() -> None:
    message = submit("xyz")
    assert (message.uid, int32s(message.input_ids).tolist()) == (7, list(b"xyz"))
    assert (message.extra_key, message.cache_salt, message.priority, message.leader) == ("key", "salt", 3, -1)


@pytest.mark.parametrize(
    ("params", "stop_ids"),
    [
        ({}, (EOS_ID, 599)),
        ({"stop_token_ids": [3]}, (3, EOS_ID, 599)),
        ({"stop_token_ids": [3, 599], "ignore_eos": True}, (3, 599)),
        ({"ignore_eos": True}, ()),
    ],
)
def test_stop_ids_are_the_models_the_tokenizers_and_the_users(
    params: dict[str, Any], stop_ids: tuple[int, ...]
) -> None:
    assert submit("a", **params).stop_ids == stop_ids


def test_seed() -> None:
    assert submit("a").seed == 11
    assert submit("a", sampling_seed=0).seed == 0


def test_samples_follow_the_first_and_differ_in_their_seeds_alone() -> None:
    """One tokenization; whatever n is, sample i has the seed that it always has."""
    first, *others = submits("xyz", None, READY, [(7, 11), (8, 12), (9, 13)], n=3)
    assert (first.uid, first.leader, first.seed) == (7, -1, 11)
    assert [(m.uid, m.leader, m.seed) for m in others] == [(8, 7, 12), (9, 7, 13)]
    for message in others:
        assert msgspec.structs.replace(message, uid=7, leader=-1, seed=11) == first
        assert message.input_ids is first.input_ids


@pytest.mark.parametrize("seed", [0, 7, -1, 2**63 - 1, -(2**63)])
def test_the_samples_of_a_seed_repeat_and_are_64_bit_integers(seed: int) -> None:
    seeds = sample_seeds(seed, 1000)
    assert seeds[0] == seed
    assert seeds[:3] == sample_seeds(seed, 3)
    assert all(-(2**63) <= s < 2**63 for s in seeds)
    assert sample_seeds(seed, 1) == [seed]
    assert [m.seed for m in submits("a", None, READY, [(1, 5), (2, 6)], n=2, sampling_seed=seed)] == seeds[:2]


def test_no_two_samples_of_near_seeds_share_theirs() -> None:
    """Seed 6's sample 7 is not seed 7's sample 6, as a symmetric hash would have it."""
    assert len({s for seed in range(-50, 50) for s in sample_seeds(seed, 100)}) == 100 * 100


def test_the_random_numbers_of_a_seeds_samples_are_independent() -> None:
    """No sample repeats another's, also not shifted by some positions."""
    seeds, positions = np.array(sample_seeds(7, 50), np.int64), np.arange(200, dtype=np.int32)
    numbers = np.array([uniform(np.repeat(seed, 200), positions) for seed in seeds])
    assert len(np.unique(numbers)) == numbers.size
    assert np.abs(np.corrcoef(numbers) - np.eye(50)).max() < 0.35  # five standard errors


@pytest.mark.parametrize(
    ("ids", "param"),
    [
        ([1, 999999], "input_ids[1]"),
        ([-1], "input_ids[0]"),
        ([0, VOCAB], "input_ids[1]"),
        ([1, 1.5], "input_ids[1]"),
        ([1, 2, "a"], "input_ids[2]"),
        ([1, True], "input_ids[1]"),
        ([1, None], "input_ids[1]"),
        ([1, [2]], "input_ids[1]"),
        ([2**70], "input_ids[0]"),
    ],
)
def test_an_id_outside_the_embedding_table_is_named(ids: list[Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        submit(ids=ids)
    assert caught.value.param == param
    assert str(VOCAB - 1) in caught.value.message


@given(st.lists(st.integers(-2, VOCAB + 1), min_size=1, max_size=30))
def test_exactly_the_ids_of_the_vocabulary_are_taken(ids: list[int]) -> None:
    wrong = [i for i, token_id in enumerate(ids) if not 0 <= token_id < VOCAB]
    if not wrong:
        assert int32s(submit(ids=ids).input_ids).tolist() == ids
        return
    with pytest.raises(RequestError) as caught:
        submit(ids=ids)
    assert caught.value.param == f"input_ids[{wrong[0]}]"


def test_a_stop_token_id_outside_the_vocabulary_is_named() -> None:
    with pytest.raises(RequestError) as caught:
        submit("a", stop_token_ids=[1, 999999])
    assert caught.value.param == "sampling_params.stop_token_ids[1]"


@pytest.mark.parametrize("token_id", [-1, VOCAB, 2**31 - 1])
def test_a_biased_id_outside_the_vocabulary_is_named(token_id: int) -> None:
    prompt = Prompt("a", None, SamplingParams(logit_bias={1: 1.0, token_id: 1.0}), "rid", ("rid",))
    with pytest.raises(RequestError) as caught:
        prepare(prompt, [(7, 11)], ByteTokenizer(), READY)
    assert caught.value.param == f"sampling_params.logit_bias[{token_id}]"
    assert submit("a", logit_bias={"0": 1, str(VOCAB - 1): 2}).params.logit_bias == {0: 1.0, VOCAB - 1: 2.0}


def test_the_embedding_table_counts_not_the_tokenizer() -> None:
    beyond = ByteTokenizer().vocab_size + 1
    assert int32s(submit(ids=[beyond]).input_ids).tolist() == [beyond]


@pytest.mark.parametrize(("length", "fits"), [(59, True), (60, True), (61, False), (1000, False)])
def test_a_prompt_that_does_not_fit_is_refused_with_both_numbers(length: int, fits: bool) -> None:
    if fits:
        assert submit("x" * length).params.max_new_tokens == CONTEXT - length
        return
    with pytest.raises(RequestError) as caught:
        submit("x" * length)
    assert caught.value.param == "text"
    assert f"{length} tokens" in caught.value.message
    assert "is 60" in caught.value.message


def test_a_prompt_must_leave_room_for_one_token() -> None:
    roomy = Ready(VOCAB, CONTEXT, 500, 500, (), 0.0, {})
    assert submit("x" * (CONTEXT - 1), ready=roomy).params.max_new_tokens == 1
    with pytest.raises(RequestError):
        submit("x" * CONTEXT, ready=roomy)


def test_max_new_tokens_below_what_fits_is_kept() -> None:
    assert submit("abc", max_new_tokens=5).params.max_new_tokens == 5
    assert submit("abc", max_new_tokens=0).params.max_new_tokens == 0
    assert submit("abc", max_new_tokens=2**31 - 1).params.max_new_tokens == CONTEXT - 3


def test_a_prompt_without_tokens_is_refused() -> None:
    with pytest.raises(RequestError) as caught:
        submit("")
    assert caught.value.param == "text"
