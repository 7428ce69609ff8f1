"""The scheduler's promises one by one, with the toy model, overlapped and not."""

from __future__ import annotations

import pytest
from differential import Runner

from gapless.runtime.core.config import ServerConfig
from gapless.runtime.core.messages import Finish, Stop, Submit
from gapless.runtime.core.sampling import SamplingParams

PROMPT = [(5 * i) % 251 for i in range(40)]
EOS = 256


@pytest.fixture(params=[False, True], ids=["overlap", "no-overlap"])
def make(request):
    def make(**options):
        defaults = {"model_path": "toy", "page_size": 1, "max_running_requests": 8, "context_length": 512}
        return Runner(ServerConfig(**defaults | options, disable_overlap_schedule=request.param))

    return make


@pytest.mark.parametrize("count", [1, 5])
def test_no_forward_beyond_the_limit(make, count):
    runner = make()
    runner.submit(1, PROMPT, count)
    runner.finish()
    assert runner.seen[1].ids == runner.expected(PROMPT, count)
    assert runner.seen[1].forwards == count, "one for the prompt, and one for each token but the last"


def test_a_request_for_no_tokens_fills_the_cache_and_ends_with_length(make):
    runner = make()
    runner.submit(1, PROMPT, 0)
    runner.finish()
    assert (runner.seen[1].ids, runner.seen[1].finish) == ([], Finish.LENGTH)
    runner.submit(2, [*PROMPT, 7], 1)
    runner.finish()
    assert runner.seen[2].cached_tokens == len(PROMPT)


def test_what_was_computed_past_eos_is_neither_sent_nor_cached(make):
    runner = make(toy="eos_at=3")
    runner.submit(1, PROMPT, 20, (EOS,))
    runner.finish()
    output = runner.seen[1].ids
    assert (len(output), output[-1], runner.seen[1].finish) == (3, EOS, Finish.STOP_TOKEN)
    runner.submit(2, [*PROMPT, *output, 9], 1)
    runner.finish()
    assert runner.seen[2].cached_tokens == len(PROMPT) + 2, "the newest token has no KV"


def test_a_stop_string_ends_the_row_where_the_detokenizer_says(make):
    runner = make()
    runner.submit(1, PROMPT, 30)
    while len(runner.seen[1].ids) < 6:
        runner.turn()
    runner.stop(1, 4)
    runner.seen[1].finish = Finish.STOP_STRING
    runner.finish()
    runner.submit(2, [*PROMPT, *runner.seen[1].ids[:6], 9], 1)
    runner.finish()
    assert runner.seen[2].cached_tokens == len(PROMPT) + 3


def test_a_stop_for_an_earlier_owner_of_the_slot_is_void(make):
    runner = make(max_running_requests=1, max_num_batched_tokens=64)
    runner.submit(1, PROMPT, 2)
    runner.finish()
    runner.submit(2, PROMPT[:9], 12)
    while len(runner.seen[2].ids) < 3:
        runner.turn()
    runner.stop(1, 1)
    runner.finish()
    assert runner.seen[2].ids == runner.expected(PROMPT[:9], 12)


@pytest.mark.parametrize("page_size", [1, 4])
def test_a_cached_prompt_leaves_one_token_to_compute(make, page_size):
    runner = make(page_size=page_size)
    for uid in (1, 2):
        runner.submit(uid, PROMPT[:16], 4)
        runner.finish()
    assert runner.seen[2].cached_tokens == (15 if page_size == 1 else 12)
    assert runner.seen[1].ids == runner.seen[2].ids == runner.expected(PROMPT[:16], 4)


def test_the_same_prompt_twice_in_one_step_uses_the_tree_s_pages(make):
    runner = make(chunked_prefill_size=16, page_size=4)
    for uid in (1, 2):
        runner.submit(uid, PROMPT, 50)
    for _ in range(12):
        runner.turn()
    runner.submit(3, PROMPT[::-1], 60)
    runner.finish()
    assert runner.seen[1].ids == runner.seen[2].ids == runner.expected(PROMPT, 50)
    assert runner.seen[3].ids == runner.expected(PROMPT[::-1], 60)


def test_no_cache_keeps_earlier_chunks(make):
    runner = make(disable_radix_cache=True, chunked_prefill_size=8)
    runner.submit(1, PROMPT, 6)
    for _ in range(4):
        runner.turn()
    assert runner.scheduler.counts[2] == len(PROMPT)
    runner.finish()
    assert runner.seen[1].ids == runner.expected(PROMPT, 6)


def test_a_small_pool_preempts_and_still_gives_every_id(make):
    runner = make(max_total_tokens=64)
    prompts = [PROMPT[i : i + 8] for i in range(6)]
    for uid, prompt in enumerate(prompts, 1):
        runner.submit(uid, prompt, 40)
    runner.finish()
    for uid, prompt in enumerate(prompts, 1):
        assert runner.seen[uid].ids == runner.expected(prompt, 40)
    assert max(runner.preemptions.values(), default=0) <= 4


def test_a_prompt_that_can_never_fit_is_refused_with_both_numbers(make):
    runner = make(max_total_tokens=64)
    runner.submit(1, [1] * 100, 5)
    assert runner.seen[1].finish == Finish.FAILED
    assert "64" in runner.seen[1].message and "100" in runner.seen[1].message
    runner.submit(2, PROMPT[:8], 3)
    runner.finish()
    assert runner.seen[2].finish == Finish.LENGTH


@pytest.mark.parametrize(("prompt_len", "asked"), [(40, 100), (8, 500)])
def test_an_output_is_cut_where_the_pool_ends(make, prompt_len, asked):
    runner = make(max_total_tokens=64)
    prompt = PROMPT[:prompt_len]
    runner.submit(1, prompt, asked)
    runner.finish()
    assert len(runner.seen[1].ids) == 64 - prompt_len + 1, "the last token needs no page"
    assert runner.seen[1].finish == Finish.LENGTH


@pytest.mark.parametrize("turns", range(6))
def test_an_abort_at_any_step_gives_all_back_and_ends_once(make, turns):
    runner = make(chunked_prefill_size=16)
    for uid in (1, 2):
        runner.submit(uid, PROMPT, 10)
    for _ in range(turns):
        runner.turn()
    runner.abort(1)
    runner.abort(1)
    runner.abort(99)
    runner.finish()
    runner.abort(2)
    runner.finish()
    assert runner.seen[1].finish == Finish.ABORT
    assert runner.seen[2].ids == runner.expected(PROMPT, 10)


def test_an_abort_names_one_request_only(make):
    runner = make(max_running_requests=1, max_num_batched_tokens=64)
    for uid in (1, 11, 111):
        runner.submit(uid, PROMPT[: uid % 7 + 3], 5)
    runner.turn()
    runner.abort(11)
    runner.finish()
    assert [runner.seen[uid].finish for uid in (1, 11, 111)] == [Finish.LENGTH, Finish.ABORT, Finish.LENGTH]


def test_a_long_prompt_shares_its_steps_with_decoding_rows(make):
    runner = make(chunked_prefill_size=8, max_num_batched_tokens=9)
    runner.submit(1, PROMPT[:4], 20)
    runner.turn()
    runner.submit(2, PROMPT, 2)
    runner.finish()
    mixed = [plan for plan in runner.plans if len(plan.slots) == 2 and plan.max_q_len > 1]
    assert len(mixed) >= 4
    assert all(len(plan.ids) <= 9 for plan in runner.plans)
    assert runner.seen[2].ids == runner.expected(PROMPT, 2)


def test_launches_are_immutable_and_name_future_tokens_by_slot(make):
    runner = make()
    runner.submit(1, PROMPT, 6)
    runner.finish()
    decode = [plan for plan in runner.plans if plan.max_q_len == 1]
    futures = [int(plan.ids[0]) for plan in decode if plan.ids[0] < 0]
    assert futures == ([-runner.seen[1].slot] * len(decode) if runner.lag else [])


def test_longest_prefix_first_prefers_the_warm_request(make):
    runner = make(schedule_policy="lpm", max_running_requests=1, max_num_batched_tokens=64)
    runner.submit(1, PROMPT, 1)
    runner.finish()
    runner.submit(2, PROMPT[::-1], 1)
    runner.submit(3, [*PROMPT, 1], 1)
    runner.finish()
    assert runner.plans[1].kv_len.tolist() == [len(PROMPT) + 1]
    assert runner.seen[3].cached_tokens == len(PROMPT)


def test_garbage_from_the_channel_is_dropped(make):
    runner = make()
    runner.submit(1, PROMPT, 5)
    runner.turn()
    for slot in (0, -1, 10**6):
        runner.scheduler.handle([Stop(slot, 0, 1)])
    runner.scheduler.handle([Stop(slot, 0, 1) for slot in range(1, 9) if slot != runner.seen[1].slot])
    runner.scheduler.handle([Submit(7, b"abc", SamplingParams(), (), seed=0)])
    runner.submit(2, [-5], 3)
    runner.submit(3, [512], 3)
    runner.finish()
    assert runner.seen[1].ids == runner.expected(PROMPT, 5)
    assert {runner.seen[uid].finish for uid in (2, 3)} == {Finish.FAILED}


def test_a_grammar_that_cannot_be_made_ends_its_own_request():
    def make_grammar(submit):
        raise ValueError("no such rule")

    runner = Runner(ServerConfig(model_path="toy", context_length=512), make_grammar=make_grammar)
    runner.submit(1, PROMPT, 5)
    assert (runner.seen[1].finish, runner.seen[1].message) == (Finish.FAILED, "no such rule")
    runner.finish()
