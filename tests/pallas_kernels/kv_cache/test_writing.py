from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.experimental import pallas as pl

from mpjax.kernels import device
from mpjax.kernels.kv_cache.writing import PROGRAMS_PER_MULTIPROCESSOR, lanes, programs_for, targets


@given(st.integers(1, 10**6), st.integers(1, 128), st.sampled_from([1, 132]))
def test_programs_share_tasks_evenly(tasks, heads, multiprocessors):
    with device.described_as(multiprocessors=multiprocessors):
        programs = programs_for(tasks, heads)
    assert 1 <= programs <= tasks
    assert programs * heads <= max(heads, PROGRAMS_PER_MULTIPROCESSOR * multiprocessors)
    rounds = -(-tasks // programs)
    assert programs * rounds - tasks < rounds  # with one program less there would be more rounds


def test_few_tasks_have_a_program_each_and_many_do_not():
    assert [programs_for(batch, 48) for batch in (1, 16, 64, 512)] == [1, 16, 32, 86]


@pytest.mark.parametrize("width", [1, 2, 3, 6, 8, 12, 24, 48, 64, 96, 128])
def test_each_channel_is_held_and_stored_once(width):
    held = np.asarray(lanes(width))
    place, is_stored = (np.asarray(x) for x in targets(width))
    assert len(held) == len(place) == pl.next_power_of_2(width)
    assert set(held.tolist()) == set(range(width))
    assert sorted(place[is_stored].tolist()) == list(range(width))
    np.testing.assert_array_equal(held[is_stored], place[is_stored])
    assert len(set(place.tolist())) == len(place)
