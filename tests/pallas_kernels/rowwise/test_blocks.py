"""Results that are rounded to blocks of 4 and 8 bits."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpjax.kernels import ActivationBlocks
from mpjax.kernels.rowwise import api, block_norm, blocks, reference
from tests.pallas_kernels.oracles import wide
from tests.pallas_kernels.rowwise.rows import EPSILON, Rows

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


@pytest.mark.parametrize("interpret", [True, on_gpu])
@pytest.mark.parametrize(
    ("shape", "splits", "residual", "permuted"),
    [
        ((5, 300), 3, True, True),
        ((2, 3, 512), 1, False, True),
        ((3, 2176), 1, True, False),
        ((140, 256), 1, True, True),  # so many rows that there are two kernels
    ],
)
def test_add_rms_norm(shape, splits, residual, permuted, interpret, rng):
    rows = Rows.random(rng, shape, "bfloat16", splits=splits, residual=residual)
    rounding = random_blocks(rng, shape[-1], permuted=permuted)
    dtype = jnp.dtype(jnp.bfloat16)
    stream, found = block_norm.add_rms_norm(
        *rows.arrays, rounding, epsilon=EPSILON, dtype=dtype, interpret=interpret
    )
    np.testing.assert_array_equal(wide(stream), wide(rows.stream()))
    _, expected = reference.add_rms_norm(*rows.arrays, EPSILON, rounding)
    assert_alike(found, expected)


def test_a_norm_of_another_dtype_than_its_weight(interpreted_triton, rng):
    rows = Rows.random(rng, (2, 300), "float32")
    rounding = random_blocks(rng, 300, permuted=True)
    stream, found = api.add_rms_norm(*rows.arrays, EPSILON, format=rounding, dtype=jnp.float16)
    expected = reference.add_rms_norm(*rows.arrays, EPSILON, rounding, jnp.dtype(jnp.float16))
    np.testing.assert_array_equal(stream, expected[0])
    assert stream.dtype == found.dtype == "float16"
    assert_alike(found, expected[1])


@pytest.mark.parametrize(
    ("rows", "blocks", "expected"),
    [(1, 32, 1), (4, 32, 1), (5, 32, 2), (8, 32, 2), (9, 32, None), (132, 1, 1), (133, 1, None)],
)
def test_programs_of_one_kernel_fit_the_gpu(rows, blocks, expected):
    assert block_norm.blocks_per_program(rows, blocks) == expected


@pytest.mark.parametrize(("rows", "kernels"), [(1, 1), (64, 2)])
def test_a_norm_in_blocks_lowers(rows, kernels, lower_for_cuda):
    shape = jax.ShapeDtypeStruct
    bits, order = shape((32,), jnp.uint8), shape((4096,), jnp.int32)
    rounding = ActivationBlocks(bits, order)  # type: ignore[arg-type]
    terms, stream = shape((4, rows, 1, 4096), jnp.float32), shape((rows, 1, 4096), jnp.bfloat16)
    norm = functools.partial(block_norm.add_rms_norm, epsilon=1e-6, dtype=jnp.dtype(jnp.bfloat16))
    program = lower_for_cuda(norm, terms, stream, shape((4096,), jnp.bfloat16), rounding)
    assert program.count("__gpu$xla.gpu.triton") == kernels
    assert ('name = "add_rms_norm_blocks"' in program) == (kernels == 1)
    assert (f"tensor<{rows}x4096xf32>" in program) == (kernels == 2)  # the norm between both
    assert f"tensor<{rows}x4096xi8>" in program
    assert f"tensor<32x{rows}xf32>" in program or f"tensor<{rows}x32xf32>" in program
