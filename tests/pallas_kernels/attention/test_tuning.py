from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pallas_kernels import backend
from pallas_kernels.attention import shapes, tuning
from pallas_kernels.kv_cache.cache import KVFormat


def assert_sound(batch: int, kv_heads: int, rows: int, pages: int, bits: int) -> None:
    config = tuning.configure(batch, kv_heads, rows, pages, KVFormat(bits))
    for size in (config.tile_rows, config.warps):
        assert size & (size - 1) == 0, f"{config}: Triton takes powers of two only"
    assert 8 <= config.tile_rows <= max(8, 2 * rows)
    assert 1 <= config.splits <= pages
    assert 1 <= config.warps <= 8
    assert config.stages >= 1
    # Accumulators of 128 channels, 32 bits each, must fit in the registers of the threads.
    assert config.tile_rows * 128 <= 128 * 32 * config.warps


@pytest.mark.parametrize("bits", [16, 8, 4])
@pytest.mark.parametrize("page_size", [64, 128])
@pytest.mark.parametrize("shape", shapes.DECODE, ids=lambda shape: shape.name)
def test_named_shapes(shape, page_size, bits):
    group = shape.query_heads // shape.kv_heads
    for tokens in (1, 4, 512):
        assert_sound(shape.batch, shape.kv_heads, group * tokens, shape.context // page_size, bits)


@given(
    *(st.integers(1, 300), st.integers(1, 128), st.integers(1, 100_000), st.integers(1, 5000)),
    st.sampled_from([16, 8, 4]),
)
def test_any_shape(batch, kv_heads, rows, pages, bits):
    assert_sound(batch, kv_heads, rows, pages, bits)


def test_one_long_sequence_is_shared_and_a_large_batch_is_not(monkeypatch):
    monkeypatch.setattr(backend, "multiprocessors", lambda: 132)
    assert tuning.configure(1, 8, 4, 1024, KVFormat(8)).splits > 4
    assert tuning.configure(256, 8, 4, 1024, KVFormat(8)).splits == 1
