from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpjax.kernels import gated, hadamard
from mpjax.kernels.rowwise import reference, triton
from tests.pallas_kernels.oracles import random_array, relative_error, wide
from tests.pallas_kernels.rowwise.rows import Rows, assert_result, parsed, run


def sylvester(size):
    """H[i, j] is −1 to the number of ones that i and j have in common; float64, orthonormal."""
    common = [[(i & j).bit_count() for j in range(size)] for i in range(size)]
    return (-1.0) ** np.array(common) / np.sqrt(size)


def in_blocks(x, block):
    """x [..., K] with each block of channels multiplied by Sylvester's matrix."""
    return (x.reshape(*x.shape[:-1], -1, block) @ sylvester(block)).reshape(x.shape)


@pytest.mark.parametrize(("shape", "block"), [((2, 3, 48), 16), ((768,), 256)])
def test_the_transform_is_sylvesters(shape, block, rng):
    x = random_array(rng, shape, "float32")
    found = hadamard(x, block)
    np.testing.assert_allclose(found, in_blocks(wide(x), block), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(hadamard(found, block), x, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_rows_by_the_kernel(dtype, rng, interpreted_triton):
    """Also of rows that are no power of two."""
    x = random_array(rng, (2, 3, 96), dtype)
    mix = functools.partial(hadamard, x, 32, dtype=dtype)
    found, plain = mix(implementation="triton"), mix(implementation="reference")
    assert (found.shape, found.dtype) == (x.shape, x.dtype)
    bound = {"bfloat16": 2.0**-8, "float16": 2.0**-11}[dtype]
    for each in (found, plain):
        assert relative_error(each, in_blocks(wide(x), 32)) < bound
    cotangent = random_array(rng, x.shape, dtype)
    [gradient] = jax.vjp(lambda x: hadamard(x, 32, dtype=dtype), x)[1](cotangent)
    assert relative_error(gradient, in_blocks(wide(cotangent), 32)) < 2 * bound


@pytest.mark.parametrize(
    ("channels", "block", "message"),
    [
        (96, 24, "is 24: expected a power of two from 16 to 4096"),
        (96, 8, "is 8: expected a power of two"),
        (1 << 14, 1 << 13, "is 8192: expected a power of two"),
        (96, 64, "is 64: expected a divisor of 96, the channels"),
        (96, 16.5, "is 16.5"),
    ],
)
def test_blocks_that_there_are_not(channels, block, message):
    with pytest.raises(ValueError, match=f"hadamard: block {message}"):
        hadamard(jnp.ones((2, channels)), block)
    with pytest.raises(ValueError, match=f"gated_silu: hadamard {message}"):
        gated(jnp.ones((1, 2, 2 * channels)), "silu", dtype="float32", hadamard=block)


@pytest.mark.parametrize(
    ("channels", "block", "dtype", "text"),
    [
        (96, 32, "bfloat16", "int8/int8"),
        (768, 256, "float16", None),
        (512, 512, "bfloat16", "float8:gK/float8"),
    ],
)
def test_the_kernel(channels, block, dtype, text, rng):
    check(channels, block, dtype, text, rng, interpret=True)


def check(channels, block, dtype, text, rng, count=3, **keywords):
    rows = Rows.random(rng, (count, 2 * channels), dtype, splits=2)
    keywords |= {"dtype": jnp.dtype(dtype), "format": parsed(text), "hadamard": block}
    found = run(triton.gated, rows.arrays[0], activation="silu", **keywords)
    keywords.pop("interpret", None)
    expected = run(reference.gated, rows.arrays[0], activation="silu", **keywords)
    exact = in_blocks(rows.gated(), block)
    if text is None:
        assert found.dtype == dtype
        assert relative_error(found, exact) < {"bfloat16": 2.0**-8, "float16": 2.0**-11}[dtype]
        return
    # Float32 sums are off by 2⁻²³ of the largest, and those of 4096 numbers by up to 2⁻²¹ on a GPU.
    # E4m3 shows that near zero.
    error = 2.0**-21 if block == 4096 else 2.0**-23
    assert_result(expected, exact, dtype, text, error=error)
    np.testing.assert_allclose(found.scales, expected.scales, rtol=1e-4)
    one, other = wide(found.values), wide(expected.values)
    assert (np.abs(one - other) <= np.maximum(np.abs(other) * 2.0**-3, 1.0)).all()
    assert (one == other).mean() > 0.98


@pytest.mark.parametrize(("channels", "block"), [(12288, 512), (14336, 2048), (1536, 128)])
def test_lowers(channels, block, lower_for_cuda):
    both = jax.ShapeDtypeStruct((1, 4, 2 * channels), "bfloat16")
    gate = functools.partial(
        *(triton.gated,),
        activation="silu",
        dtype=jnp.dtype("bfloat16"),
        format=parsed("int8/int8"),
        hadamard=block,
    )
    program = lower_for_cuda(gate, both)
    assert 'name = "gated_silu_hadamard"' in program
    assert "dot_general" in program


@pytest.mark.gpu
@pytest.mark.parametrize("text", [None, "int8/int8", "float8:gK/float8"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_on_the_gpu(dtype, text, rng):
    for channels, block in ((12288, 512), (28672, 4096), (1536, 16), (768, 128)):
        check(channels, block, dtype, text, rng, count=33)
        if text is None:
            x = random_array(rng, (33, channels), dtype)
            found = hadamard(x, block, dtype=dtype, implementation="triton")
            bound = {"bfloat16": 2.0**-8, "float16": 2.0**-11}[dtype]
            assert relative_error(found, in_blocks(wide(x), block)) < bound
