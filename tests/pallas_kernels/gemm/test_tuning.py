from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels import backend
from pallas_kernels.gemm import shapes, tuning
from tests.pallas_kernels.gemm.weights import weight_struct
from tests.pallas_kernels.oracles import WEIGHT_FORMATS


def assert_sound(rows: int, text: str, channels: int, outputs: int) -> None:
    weight = weight_struct(text, channels, outputs)
    config = tuning.configure(rows, weight)
    for size in (config.tile_m, config.tile_n, config.warps):
        assert size & (size - 1) == 0, f"{config}: Triton takes powers of two only"
    assert config.tile_m >= 16
    assert config.tile_n >= 16
    assert 1 <= config.splits <= weight.words.shape[0]
    assert 1 <= config.warps <= 8
    assert config.stages >= 1
    # Accumulators, 32 bits each, must fit in the registers of the program's threads.
    assert config.tile_m * config.tile_n <= 128 * 32 * config.warps
    # The rows of a tile are not mostly padding.
    assert config.tile_m <= max(16, 2 * rows)


@pytest.mark.parametrize("shape", shapes.QWEN3_8B + shapes.LLAMA3_70B, ids=lambda s: s.name)
@pytest.mark.parametrize("text", WEIGHT_FORMATS)
def test_named_shapes(shape, text):
    for rows in (1, 2, 8, 16, 17, 64, 256, 1000):
        assert_sound(rows, text, shape.channels, shape.outputs)


@settings(max_examples=30)
@given(
    rows=st.integers(1, 5000),
    text=st.sampled_from(WEIGHT_FORMATS),
    groups=st.integers(1, 200),
    outputs=st.integers(1, 60_000),
)
def test_any_shape(rows, text, groups, outputs):
    assert_sound(rows, text, groups * 128, outputs)


@pytest.mark.parametrize("multiprocessors", [16, 132])
def test_small_gpus_get_fewer_programs(multiprocessors, monkeypatch):
    monkeypatch.setattr(backend, "multiprocessors", lambda: multiprocessors)
    assert_sound(1, "uint4:g128", 4096, 4096)


def test_a_few_rows_are_fused():
    assert tuning.FUSED_ROWS >= 16
