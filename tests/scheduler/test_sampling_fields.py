"""Sampling fields through the whole scheduler and the real worker, on a model whose logits are known.

The model's logits depend on the newest token alone, so that an output is worked out from the fields' definition. All
numbers are multiples of 1/8, so that float32 and float64 agree on what is largest and what is equal.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from table_model import MARKOV, VOCABULARY, Asked, TableModel, make, run, stated_output, submit
from torch import Tensor

from gapless.runtime.core.messages import Finish
from gapless.runtime.model.adjust import Adjustments

CONSTANT = torch.full((VOCABULARY, VOCABULARY), -50.0)
CONSTANT[:, :4] = torch.tensor([1.75, 1.5, 1.25, 1.0])
SMALL, LARGE = 48, 2048  # tokens in the pool

pytestmark = pytest.mark.usefixtures("model")


@pytest.mark.parametrize("no_overlap", [False, True])
@pytest.mark.parametrize(
    ("asked", "want"),
    [
        (Asked({}), [0] * 20),
        (Asked({"frequency_penalty": 2}), [0, 1, 2, 3] * 5),
        (Asked({"frequency_penalty": 0.25}), [0, 0, 1, 0, 1, 2] + [0, 1, 2, 3] * 3 + [0, 1]),
        (Asked({"presence_penalty": 2}), [0, 1, 2, 3] + [0] * 16),
        (Asked({"repetition_penalty": 2}, prompt=[0, 5]), [1, 2, 3] + [0] * 17),
        (Asked({"repetition_penalty": 0.5}, prompt=[2, 5]), [2] * 20),
        (Asked({"logit_bias": {"3": 1}}), [3] * 20),
        (Asked({"logit_bias": {"0": -100}}), [1] * 20),
        (Asked({}, stop_ids=(0,)), [0]),
        (Asked({"min_new_tokens": 4}, stop_ids=(0,)), [1, 1, 1, 1, 0]),
        (Asked({"min_new_tokens": 20}, stop_ids=(0,)), [1] * 20),
    ],
)
def test_each_field_alone_shows_in_the_ids_of_the_whole_output(
    model: TableModel, asked: Asked, want: list[int], no_overlap: bool
) -> None:
    """The logits are always the same. A penalty that saw a placeholder, or that looked back over a window only, would
    miss a token, and the output would not go round."""
    model.table = CONSTANT
    assert run({1: asked}, disable_overlap_schedule=no_overlap) == {1: want}
    assert stated_output(CONSTANT, asked, 1) == want


@pytest.mark.parametrize("no_overlap", [False, True])
def test_no_end_before_min_new_tokens_however_likely_it_is(model: TableModel, no_overlap: bool) -> None:
    """Two ids end the request, one of them forced by a bias; with ignore_eos the user's own id is the only one."""
    model.table = CONSTANT
    fields = {"logit_bias": {"0": 100}, "min_new_tokens": 4}
    requests = {1: Asked(fields, stop_ids=(0, 1)), 2: Asked(fields, stop_ids=(1,))}
    runner = make(requests, disable_overlap_schedule=no_overlap)
    for uid, asked in requests.items():
        submit(runner, uid, asked)
    runner.finish()
    assert (runner.seen[1].ids, runner.seen[1].finish) == ([2, 2, 2, 2, 0], Finish.STOP_TOKEN)
    assert (runner.seen[2].ids, runner.seen[2].finish) == ([0] * 20, Finish.LENGTH)


MIX = {
    "frequency": Asked({"frequency_penalty": 1.5}, [3, 9, 9], 24),
    "grammar": Asked({}, [3, 1], 24, constrained=True),
    "bias": Asked({"logit_bias": {str(i): 1.125 for i in range(10)}}, [3], 24),
    "at least": Asked({"min_new_tokens": 9}, [7, 3], 24, tuple(range(0, VOCABULARY, 3))),
    "presence": Asked({"presence_penalty": -0.75}, [4, 4], 24),
    "repetition": Asked({"repetition_penalty": 1.25}, list(range(12)), 24),
    "grammar and all": Asked(
        {
            "frequency_penalty": 0.5,
            "presence_penalty": 0.25,
            "repetition_penalty": 2,
            "logit_bias": {"7": 3, "9": -2},
            "min_new_tokens": 5,
        },
        [3, 3, 3, 1],
        24,
        tuple(range(0, VOCABULARY, 4)),
        constrained=True,
    ),
    "drawn": Asked({"temperature": 1, "frequency_penalty": 2, "logit_bias": {"5": 2}}, [3, 8], 24),
    "drawn within filters": Asked(
        {"temperature": 0.5, "top_k": 5, "top_p": 0.9, "repetition_penalty": 1.5}, [6], 24
    ),
    "drawn by a grammar": Asked({"temperature": 2, "presence_penalty": 1}, [6, 2], 24, constrained=True),
}


def test_no_neighbour_changes_a_plain_request() -> None:
    """Greedy and drawn, alone, beside each other kind of request, and beside all of them."""
    plain = {1: Asked({}, [3, 2, 1], 24), 2: Asked({"temperature": 1}, [3, 2], 24)}
    alone = {uid: stated_output(MARKOV, asked, uid) for uid, asked in plain.items()}
    assert run({1: plain[1]}) | run({2: plain[2]}) == alone
    for name, other in MIX.items():
        ids = run({3: other} | plain)
        assert (ids[1], ids[2]) == (alone[1], alone[2]), name
    everything = dict(enumerate(MIX.values(), 3)) | plain
    ids = run(everything, max_running_requests=16)
    assert (ids[1], ids[2]) == (alone[1], alone[2])


@pytest.mark.parametrize("no_overlap", [False, True])
@pytest.mark.parametrize("steps", [1, 4])
@pytest.mark.parametrize("pool", [SMALL, LARGE])
@pytest.mark.parametrize("slots", [2, 16])
def test_every_cell_gives_what_each_requests_fields_mean(
    no_overlap: bool, steps: int, pool: int, slots: int
) -> None:
    """Slots are reused by requests that ask for something else, and in a small pool some are preempted half-way."""
    requests = dict(enumerate(MIX.values(), 1))
    runner = make(
        requests,
        disable_overlap_schedule=no_overlap,
        num_scheduler_steps=steps,
        max_total_tokens=pool,
        max_running_requests=slots,
    )
    for uid, asked in requests.items():
        submit(runner, uid, asked)
    half_way: set[int] = set()
    admission, rows = runner.scheduler.admission, runner.scheduler.batch.rows
    while runner.turn():
        for slot in runner.scheduler.batch.running.tolist():
            request = runner.scheduler.batch.request(slot)
            if (
                pool == SMALL
                and not half_way
                and request.submit.params.adjusts_logits
                and rows.output_len[slot] > 3
            ):
                half_way.add(admission.preemption.preempt(request).submit.uid)
    runner.finish()
    assert half_way or pool == LARGE, "nobody was preempted half-way"
    for uid, asked in requests.items():
        assert runner.seen[uid].ids == stated_output(MARKOV, asked, uid)


FIELDS = st.fixed_dictionaries(
    {},
    optional={
        "frequency_penalty": st.sampled_from([-0.5, 0.25, 2]),
        "presence_penalty": st.sampled_from([-0.75, 0.5, 2]),
        "repetition_penalty": st.sampled_from([0.5, 1.25, 2]),
        "logit_bias": st.dictionaries(
            st.integers(0, VOCABULARY - 1), st.integers(-20, 20).map(lambda n: n / 8)
        ),
        "min_new_tokens": st.integers(0, 9),
    },
)
ASKED = st.builds(
    Asked,
    FIELDS,
    st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=12),
    st.sampled_from([9, 20]),
    st.sampled_from([(), tuple(range(0, VOCABULARY, 3)), (1, 2)]),
    st.booleans(),
)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    data=st.data(),
    requests=st.lists(ASKED, min_size=1, max_size=6).map(lambda asked: dict(enumerate(asked, 1))),
    no_overlap=st.booleans(),
    steps=st.sampled_from([1, 4]),
    pool=st.sampled_from([SMALL, LARGE]),
    chunk=st.sampled_from([3, 64]),
)
def test_any_mix_in_any_cell_gives_what_the_fields_mean(
    data: st.DataObject, requests: dict[int, Asked], no_overlap: bool, steps: int, pool: int, chunk: int
) -> None:
    runner = make(
        requests,
        disable_overlap_schedule=no_overlap,
        num_scheduler_steps=steps,
        max_total_tokens=pool,
        chunked_prefill_size=chunk,
        max_running_requests=3,
    )
    ready = iter(data.draw(st.lists(st.booleans(), max_size=20)))
    runner.late_ready = lambda: next(ready, True)
    for uid, asked in requests.items():
        submit(runner, uid, asked)
        for _ in range(data.draw(st.integers(0, 3))):
            runner.turn()
    runner.finish()
    for uid, asked in requests.items():
        assert runner.seen[uid].ids == stated_output(MARKOV, asked, uid)


def test_a_record_that_lags_behind_is_seen(model: TableModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """What goes wrong where penalties read a list whose newest entry is still a placeholder."""
    newest: dict[int, Tensor] = {}
    record = Adjustments.record

    def record_the_one_before(self: Adjustments, slot: int, output_index: int, token: Tensor) -> None:
        record(self, slot, output_index, newest.get(slot, torch.tensor([0])))
        newest[slot] = token.clone()

    monkeypatch.setattr(Adjustments, "record", record_the_one_before)
    model.table = CONSTANT
    asked = Asked({"frequency_penalty": 2})
    assert run({1: asked})[1] != stated_output(CONSTANT, asked, 1)
