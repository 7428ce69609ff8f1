"""Whatever the interleaving, the ids are the toy model's closed form and every page comes back."""

from __future__ import annotations

import itertools
import random
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scripts import random_config, random_script, run_script

from gapless.runtime.scheduler import sharing

CELLS = list(itertools.product((0, 1), (1, 4), (1, 4, 16), (False, True), (3, 16)))


@pytest.mark.parametrize(
    "cell", CELLS, ids=lambda cell: "lag{}-steps{}-page{}-nocache{:d}-chunk{}".format(*cell)
)
@settings(max_examples=50, deadline=None)
@given(
    seed=st.integers(0, 2**32), late=st.booleans(), least_shared=st.sampled_from([1, sharing.LEAST_SHARED])
)
def test_ids_equal_the_closed_form_in_every_cell(cell, seed, late, least_shared):
    lag, steps, page_size, no_cache, chunk = cell
    rng = random.Random(seed)
    config = random_config(
        rng,
        disable_overlap_schedule=lag == 0,
        num_scheduler_steps=steps,
        page_size=page_size,
        disable_radix_cache=no_cache,
        chunked_prefill_size=chunk,
    )
    with mock.patch.object(sharing, "LEAST_SHARED", least_shared):  # short prompts share too
        run_script(config, random_script(rng), late=late)
