"""Whatever the interleaving, the ids are the toy model's closed form and every page comes back."""

from __future__ import annotations

from differential import Runner
from hypothesis import given, settings
from hypothesis import strategies as st

from gapless.runtime.core.config import ServerConfig
from gapless.runtime.core.messages import Finish

STEMS = [[(7 * i + 3 * j) % 250 for i in range(40)] for j in range(3)]


@st.composite
def configs(draw):
    page_size = draw(st.sampled_from([1, 4, 16]))
    running = draw(st.integers(1, 6))
    return ServerConfig(
        model_path="toy",
        page_size=page_size,
        disable_overlap_schedule=draw(st.booleans()),
        num_scheduler_steps=draw(st.sampled_from([1, 1, 4])),
        disable_radix_cache=draw(st.booleans()),
        chunked_prefill_size=draw(st.sampled_from([1, 3, 16, 64])),
        max_num_batched_tokens=draw(st.sampled_from([8, 32, 256])),
        max_running_requests=running,
        max_total_tokens=draw(st.sampled_from([64, 96, 160, 1024])),
        context_length=draw(st.sampled_from([64, 128])),
        schedule_policy=draw(st.sampled_from(["fcfs", "lpm"])),
        toy=draw(st.sampled_from(["", "eos_at=3", "eos_at=1", "vocab_size=257"])),
    )


@st.composite
def requests(draw):
    stem, length = draw(st.sampled_from(STEMS)), draw(st.integers(0, 40))
    tail = draw(st.lists(st.integers(0, 255), max_size=6))
    return {
        "prompt": (stem[:length] + tail) or [1],
        "max_new_tokens": draw(st.sampled_from([0, 1, 2, 5, 17, 40])),
        "stop_ids": draw(st.sampled_from([(), (256,), (256, 9, 77, 140, 200, 12)])),
        "arrive": draw(st.integers(0, 30)),
        "abort": draw(st.none() | st.integers(0, 40)),
        "stop": draw(st.none() | st.integers(1, 12)),
    }


@settings(max_examples=300, deadline=None)
@given(config=configs(), script=st.lists(requests(), min_size=1, max_size=9), late=st.booleans())
def test_ids_equal_the_closed_form_in_every_cell(config, script, late):
    runner = Runner(config, late=late)
    arrived, stopped, aborted = set(), set(), set()
    for now in range(45):
        for uid, request in enumerate(script, 1):
            if request["arrive"] == now:
                runner.submit(uid, request["prompt"], request["max_new_tokens"], request["stop_ids"])
                arrived.add(uid)
            if request["abort"] == now and uid in arrived:
                runner.abort(uid)
                aborted.add(uid)
            seen = runner.seen.get(uid)
            if seen and request["stop"] and len(seen.ids) >= request["stop"] and uid not in stopped:
                runner.stop(uid, request["stop"])
                stopped.add(uid)
        runner.turn()
    # Who was stopped gets no terminal from the scheduler: the detokenizer, who found the stop, is its author.
    for uid in stopped:
        if not runner.seen[uid].finish:
            runner.seen[uid].finish = Finish.STOP_STRING
    runner.finish()
    for uid, request in enumerate(script, 1):
        check(runner, request, runner.seen[uid], cut=uid in stopped or uid in aborted)


def check(runner, request, seen, cut):
    prompt, scheduler = request["prompt"], runner.scheduler
    if len(prompt) > scheduler.max_prompt_tokens:
        assert seen.finish in (Finish.FAILED, Finish.ABORT)
        return
    room = min(scheduler.context_length - len(prompt), scheduler.pool_tokens - len(prompt) + 1)
    want = runner.expected(prompt, min(request["max_new_tokens"], room), request["stop_ids"])
    if cut and seen.finish in (Finish.ABORT, Finish.STOP_STRING):
        assert seen.ids == want[: len(seen.ids)]
        return
    assert seen.ids == want
    assert seen.finish == (Finish.STOP_TOKEN if want and want[-1] in request["stop_ids"] else Finish.LENGTH)
    assert 0 <= seen.cached_tokens < len(prompt)
