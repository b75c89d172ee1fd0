from __future__ import annotations

import pytest

from mpjax.engine.compiled import Programs

pytestmark = pytest.mark.any_version


@pytest.mark.parametrize("sequences", [1, 32])
@pytest.mark.parametrize("slots", [1, 4, 5, 48, 64, 256, 1024])
@pytest.mark.parametrize("chunk", [8, 100, 1024, 8192])
def test_there_are_few_sizes_and_each_number_has_one(slots, chunk, sequences, tiny):
    found = Programs(tiny.model, chunk=chunk, sequences=sequences, slots=slots, steps=8)
    decoding = sum(map(len, found.decoding_sizes.values()))
    # A reading that is not greedy has one size; scores and clearing have one program each.
    reading = len(found.reading_sizes) * len(found.piece_sizes)
    assert decoding + reading + 1 + 2 <= 15
    assert found.reading_sizes[-1] == chunk
    assert found.reading_size(chunk, 1, greedy=False, scored=False) == (chunk, slots)
    prompts = min(sequences, slots)
    tokens, pieces = found.reading_size(1, prompts, greedy=True, scored=False)
    assert tokens <= max(chunk // 8, 16)
    assert pieces == prompts
    assert found.reading_size(1, slots, greedy=True, scored=False) == (tokens, slots)
    assert found.reading_size(1, 1, greedy=False, scored=True) == (found.scored_size, prompts)
    assert found.scored_size <= chunk
    for rows in {1, 2, slots // 2 + 1, slots}:
        if rows <= slots:
            size = found.decoding_size(rows, steps=8, greedy=True)
            assert rows <= size <= min(slots, max(4, 16 * rows))
            assert rows <= found.decoding_size(rows, steps=1, greedy=False) <= slots
