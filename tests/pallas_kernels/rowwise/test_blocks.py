from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpjax.kernels import ActivationBlocks
from mpjax.kernels.rowwise import api, blocks, reference
from tests.pallas_kernels.oracles import wide
from tests.pallas_kernels.rowwise.rows import Rows

on_gpu = pytest.param(False, marks=pytest.mark.gpu)


def random_blocks(rng: np.random.Generator, channels: int, *, permuted: bool) -> ActivationBlocks:
    """Widths at random, both of which occur where there are two blocks."""
    bits = rng.choice([4, 8], -(-channels // 128)).astype(np.uint8)
    bits[:2] = [4, 8][: len(bits)]
    order = jnp.asarray(rng.permutation(channels).astype(np.int32)) if permuted else None
    return ActivationBlocks(jnp.asarray(bits), order)


def assert_alike(found, expected):
    """Equal but for a rounding that went the other way."""
    assert (found.dtype, found.is_permuted) == (expected.dtype, expected.is_permuted)
    assert found.values.shape == expected.values.shape
    np.testing.assert_allclose(found.scales, expected.scales, rtol=1e-5)
    one, other = wide(found.values), wide(expected.values)
    assert np.abs(one - other).max() <= 1
    assert (one == other).mean() > 0.99


@pytest.mark.parametrize("interpret", [True, on_gpu])
@pytest.mark.parametrize(("channels", "permuted"), [(300, True), (1536, False)])
def test_gated_silu(channels, permuted, interpret, rng):
    rows = Rows.random(rng, (3, 2 * channels), "float16", splits=2)
    rounding = random_blocks(rng, channels, permuted=permuted)
    dtype = jnp.dtype(jnp.float16)
    found = blocks.gated_silu(rows.arrays[0], rounding, dtype=dtype, interpret=interpret)
    assert_alike(found, reference.gated(rows.arrays[0], "silu", dtype, rounding))


@pytest.mark.parametrize("interpret", [True, on_gpu])
@pytest.mark.parametrize(("channels", "permuted"), [(60, False), (1200, True)])
def test_quantize_rows(channels, permuted, interpret, rng):
    x = Rows.random(rng, (2, 3, channels), "bfloat16", terms_dtype="bfloat16").arrays[0][0]
    rounding = random_blocks(rng, channels, permuted=permuted)
    found = blocks.quantize_rows(x, rounding, interpret=interpret)
    assert_alike(found, api.quantize_rows(x, rounding, implementation="reference"))


def test_what_is_not_finite_shows_in_the_scale_of_its_block():
    x = jnp.ones((2, 300), jnp.bfloat16).at[1, 130].set(np.inf)
    found = blocks.quantize_rows(x, ActivationBlocks(), interpret=True)
    assert np.isnan(found.scales).tolist() == [[False] * 3, [False, True, False]]


@pytest.mark.parametrize(
    ("bits", "order", "message"),
    [
        (jnp.full(2, 8, jnp.uint8), None, r"have bits .*, and there are 300 channels"),
        (None, jnp.arange(128), r"have permutation .* expected integers of shape \(300,\)"),
        (jnp.ones(3), None, "have bits .*: expected integers"),
    ],
)
def test_blocks_of_other_channels_are_refused(bits, order, message):
    with pytest.raises(ValueError, match=message):
        api.quantize_rows(jnp.ones((2, 300)), ActivationBlocks(bits, order))


def test_lowers_at_the_sizes_of_qwen3_8b(lower_for_cuda):
    shape = jax.ShapeDtypeStruct

    def of(channels: int) -> ActivationBlocks:
        bits, order = shape((channels // 128,), jnp.uint8), shape((channels,), jnp.int32)
        return ActivationBlocks(bits, order)  # type: ignore[arg-type]

    dtype = jnp.dtype(jnp.bfloat16)
    gate = functools.partial(blocks.gated_silu, dtype=dtype)
    program = lower_for_cuda(gate, shape((1, 1, 7, 24576), jnp.bfloat16), of(12288))
    assert 'name = "gated_silu_blocks"' in program
    program = lower_for_cuda(blocks.quantize_rows, shape((7, 4096), jnp.bfloat16), of(4096))
    assert 'name = "quantize_rows_blocks"' in program
