from __future__ import annotations

import pytest

from mpjax.engine.compiled import Programs
from mpjax.engine.planner import Sizes, small_chunk

pytestmark = pytest.mark.any_version


@pytest.mark.parametrize("proposed", [0, 4])
@pytest.mark.parametrize("rides", [False, True])
@pytest.mark.parametrize("slots", [1, 4, 5, 48, 64, 256, 1024])
@pytest.mark.parametrize("chunk", [8, 100, 1024, 8192])
def test_there_are_few_sizes_and_each_number_has_one(slots, chunk, rides, proposed, tiny):
    sizes = Sizes(slots, 9, 32, chunk=chunk, rides=rides, proposed=proposed)
    found = Programs(tiny.model, sizes)
    decoding = sum(map(len, found.decoding_sizes.values()))
    # A reading that is not greedy has one size; scores, clearing and what proposers read have one
    # program each.
    riding = len(found.rider_sizes[True]) - 1 if rides else 0
    assert decoding + len(found.reading_sizes) + riding + 1 + 2 + bool(proposed) <= 15
    assert found.reading_sizes[0] == small_chunk(chunk)
    for rows in (0, 1, slots):
        if rides:
            sizes = [found.rider_size(rows, greedy=how, scored=False) for how in (True, False)]
            assert (sizes[0] == 0) == (rows == 0)
            assert rows <= sizes[0] <= sizes[1] == slots
    assert found.rider_size(0, greedy=False, scored=True) == 0
    assert found.reading_sizes[-1] == chunk
    assert found.reading_size(chunk, greedy=False, scored=False) == chunk
    assert found.reading_size(1, greedy=True, scored=False) <= max(chunk // 8, 16)
    assert found.reading_size(1, greedy=False, scored=True) == found.scored_size <= chunk
    for rows in {1, 2, slots // 2 + 1, slots}:
        if rows <= slots:
            size = found.decoding_size(rows, steps=8, greedy=True)
            assert rows <= size <= min(slots, max(4, 16 * rows))
            for greedy in {not rides, False}:
                assert rows <= found.decoding_size(rows, steps=1, greedy=greedy) <= slots
