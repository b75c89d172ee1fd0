from __future__ import annotations

import pytest

from mpjax.engine.compiled import Programs
from mpjax.engine.sizes import Sizes, middle_chunk, small_chunk
from tests.mpjax.engine.conftest import make_engine

pytestmark = pytest.mark.any_version


@pytest.mark.parametrize("chunk", [1, 16, 100, 4096])
def test_chunks_are_ordered(chunk):
    assert 1 <= small_chunk(chunk) <= middle_chunk(chunk) <= chunk
    assert small_chunk(chunk) <= Sizes(1, (2,), 32, chunk=chunk).scored <= chunk


@pytest.mark.parametrize("greedy", [True, False])
def test_fine_sizes_follow_the_work(greedy, tiny):
    sizes = Sizes(64, (9,), 32, chunk=1024, sequences=32, fine=True)
    found = Programs(tiny.model, sizes)
    steps = 8 if greedy else 1
    for rows in (1, 3, 16, 17, 64):
        assert rows <= found.decoding_size(rows, steps=steps, greedy=greedy) < 4 * rows + 1
    for tokens in (1, 16, 60, 300, 1024):
        size = found.reading_size(tokens, greedy=greedy, scored=False)
        assert tokens <= size <= max(16, 4 * tokens)
    assert [found.piece_size(n) for n in (1, 2, 32)] == [1, 32, 32]
    assert sizes.column_sizes(3) == [3]
    assert sizes.column_sizes(64) == [4, 16, 64]


def test_other_sizes_have_room_for_all(tiny):
    sizes = Sizes(64, (9,), 32, chunk=1024, sequences=32)
    assert Programs(tiny.model, sizes).piece_sizes == [32]
    assert sizes.column_sizes(64) == [64]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_one_request_on_a_cpu_runs_small_programs(temperature, tiny):
    """By default, and with few entries of its block table until it has more pages."""
    runs = []
    with make_engine(tiny, slots=None, chunk_tokens=None, steps=1, max_tokens=None) as engine:
        assert engine.slots == 8
        engine.observe(runs.append)
        engine.submit([1, 2, 3], max_new_tokens=3, sampling={"temperature": temperature}).result()
        used = [name[1:] for name in engine._runner.programs.used]
    assert {(run.kind, run.size) for run in runs} == {("read", 16), ("decode", 1)}
    entries = engine.max_tokens // 32
    assert {name[-4] for name in used} == {min(4, entries)}


def test_tokens_stay_where_a_row_outgrows_its_columns(tiny):
    """The tokens of a row with 4, then 16, of its entries, and of others beside it."""
    with make_engine(tiny, steps=2, max_tokens=192) as engine:
        prompts = [[1, 2, 3], [5] * 20]
        found = engine.generate(prompts, max_new_tokens=140).tokens
        columns = {name[-4] for name in engine._runner.programs.used if len(name) > 1}
    assert columns == {4, 6}
    with make_engine(tiny, steps=2, max_tokens=192) as engine:
        sizes = engine._runner.programs._limits
        object.__setattr__(sizes, "fine", False)
        assert engine.generate(prompts, max_new_tokens=140).tokens == found
        columns = {name[-4] for name in engine._runner.programs.used if len(name) > 1}
    assert columns == {6}
