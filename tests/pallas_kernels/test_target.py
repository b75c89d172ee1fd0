from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpjax.kernels.launch import Settings, launch, load, store
from mpjax.kernels.target import current_target
from tests.pallas_kernels.oracles import NUMPY_DTYPES, as_array, wide


def apply(operation, *tiles, dtype="float32", interpret=False):
    """An operation of the kernel's target on whole tiles, in a kernel of its own."""

    def kernel(*references):
        *inputs, out = references
        place = tuple(jnp.meshgrid(*(jnp.arange(side) for side in out.shape), indexing="ij"))
        tiles = (load(ref.at[place]) for ref in inputs)
        store(out.at[place], operation(current_target(), *tiles))

    return launch(
        kernel,
        *tiles,
        out_shape=jax.ShapeDtypeStruct(tiles[0].shape, dtype),
        grid=(1,),
        settings=Settings("arithmetic"),
        interpret=interpret,
    )


@pytest.fixture
def values(rng):
    return as_array(rng.uniform(0.1, 9, (8, 32)) * rng.choice([-1, 1], (8, 32)), "float32")


ORACLES = {
    "exp2": np.exp2,
    "log2": lambda x: np.log2(np.abs(x)),
    "reciprocal": lambda x: 1 / x,
    "multiply_add": lambda x: x * x + x,
}


def call(name):
    if name == "log2":
        return lambda target, x: target.log2(jnp.abs(x))
    if name == "multiply_add":
        return lambda target, x: target.multiply_add(x, x, x)
    return lambda target, x: getattr(target, name)(x)


@pytest.mark.parametrize(
    ("name", "instruction"),
    [
        ("exp2", "ex2.approx.ftz.f32"),
        ("log2", "lg2.approx.ftz.f32"),
        ("reciprocal", "rcp.approx.ftz.f32"),
        ("multiply_add", "fma.rn.f32"),
    ],
)
def test_lowers_to_one_instruction(name, instruction, lower_for_cuda):
    tile = jax.ShapeDtypeStruct((8, 32), jnp.float32)
    program = lower_for_cuda(lambda x: apply(call(name), x), tile)
    assert program.count(instruction) == 1


@pytest.mark.gpu
@pytest.mark.parametrize("name", ORACLES)
def test_on_the_gpu(name, values):
    found = jax.jit(lambda x: apply(call(name), x))(values)
    np.testing.assert_allclose(found, ORACLES[name](wide(values)), rtol=1e-6, atol=1e-6)


@pytest.mark.gpu
def test_division_is_rounded_correctly_on_the_gpu(rng):
    x = rng.standard_normal((64, 64)).astype(np.float32)
    y = (rng.standard_normal((64, 64)) * 10 ** rng.uniform(-5, 5, (64, 64))).astype(np.float32)
    divide = jax.jit(lambda x, y: apply(lambda target, x, y: target.divide(x, y), x, y))
    np.testing.assert_array_equal(divide(jnp.asarray(x), jnp.asarray(y)), x / y)


@pytest.mark.gpu
def test_multiply_add_rounds_once_on_the_gpu(rng):
    """With a factor for each row."""
    factor, other = rng.standard_normal((2, 64, 64)).astype(np.float32)
    other = np.broadcast_to(other[:, :1], other.shape)
    exact = factor.astype(np.float64) * other.astype(np.float64)
    addend = -exact.astype(np.float32)  # what is left is the product's rounding error
    operation = jax.jit(lambda *x: apply(lambda target, *x: target.multiply_add(*x), *x))
    found = operation(*map(jnp.asarray, (factor, other, addend)))
    np.testing.assert_array_equal(np.asarray(found, np.float64), exact + addend)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", NUMPY_DTYPES)
def test_narrowing_on_the_gpu(dtype, values):
    narrow = jax.jit(lambda x: apply(lambda target, x: target.narrow(x, dtype), x, dtype=dtype))
    expected = np.asarray(values).astype(NUMPY_DTYPES[dtype])
    np.testing.assert_array_equal(np.asarray(narrow(values)), expected)


def all_finite(dtype):
    values = np.arange(2**16, dtype=np.uint16).view(NUMPY_DTYPES[dtype])
    return np.where(np.isfinite(values.astype(np.float32)), values, np.zeros_like(values))


def test_widening_lowers_to_an_instruction_for_each(lower_for_cuda):
    def widen(x):
        return apply(lambda target, x: target.widen(x), x, dtype=jnp.float32)

    program = lower_for_cuda(widen, jax.ShapeDtypeStruct((8, 32), jnp.bfloat16))
    assert program.count("shl.b32 $0, $2, 16; and.b32 $1, $2, 0xFFFF0000;") == 1


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", NUMPY_DTYPES)
def test_widening_on_the_gpu(dtype):
    values = all_finite(dtype).reshape(256, 256)
    widen = jax.jit(lambda x: apply(lambda target, x: target.widen(x), x, dtype=jnp.float32))
    np.testing.assert_array_equal(np.asarray(widen(jnp.asarray(values))), values.astype(np.float32))
