from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpjax.kernels import ActivationBlocks, device
from mpjax.kernels.rowwise import api, block_norm, reference
from tests.pallas_kernels.oracles import wide
from tests.pallas_kernels.rowwise.rows import EPSILON, Rows
from tests.pallas_kernels.rowwise.test_blocks import assert_alike, random_blocks

on_gpu = pytest.param(False, marks=pytest.mark.gpu)


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


def test_both_ways_give_the_same(rng, monkeypatch):
    arrays = Rows.random(rng, (3, 300), "bfloat16", splits=2, residual=True).arrays
    rounding = random_blocks(rng, 300, permuted=True)
    run = functools.partial(
        block_norm.add_rms_norm.__wrapped__,
        *(*arrays, rounding),
        epsilon=EPSILON,
        dtype=jnp.dtype(jnp.bfloat16),
        interpret=True,
    )
    one = run()
    monkeypatch.setattr(device, "multiprocessors", lambda: 0)
    for found, expected in zip(jax.tree.leaves(one), jax.tree.leaves(run()), strict=True):
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize(("rows", "kernels"), [(1, 1), (64, 2)])
def test_lowers_at_the_sizes_of_qwen3_8b(rows, kernels, lower_for_cuda):
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
