from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpjax.kernels import matmul, quantize
from mpjax.kernels.gemm import triton as gemm
from mpjax.kernels.gemm.plans.configuration import TritonConfig
from mpjax.kernels.launch import Settings, launch, load, store
from mpjax.kernels.rowwise import triton as rowwise
from mpjax.kernels.target import PLAIN, Target, current_target, tracing_for
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


@pytest.mark.parametrize("name", ORACLES)
def test_plain(name, values):
    found = apply(call(name), values, interpret=True)
    np.testing.assert_allclose(found, ORACLES[name](wide(values)), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", NUMPY_DTYPES)
def test_plain_narrowing(dtype, values):
    found = apply(lambda target, x: target.narrow(x, dtype), values, dtype=dtype, interpret=True)
    np.testing.assert_array_equal(np.asarray(found), np.asarray(values).astype(NUMPY_DTYPES[dtype]))


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


@pytest.mark.parametrize(("dtype", "suffix"), [("bfloat16", "bf16x2"), ("float16", "f16x2")])
def test_narrowing_lowers_to_one_instruction_for_two(dtype, suffix, lower_for_cuda):
    tile = jax.ShapeDtypeStruct((8, 32), jnp.float32)

    def narrow(x):
        return apply(lambda target, x: target.narrow(x, dtype), x, dtype=dtype)

    assert f"cvt.rn.{suffix}.f32" in lower_for_cuda(narrow, tile)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ORACLES)
def test_on_the_gpu(name, values):
    found = jax.jit(lambda x: apply(call(name), x))(values)
    np.testing.assert_allclose(found, ORACLES[name](wide(values)), rtol=1e-6, atol=1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", NUMPY_DTYPES)
def test_narrowing_on_the_gpu(dtype, values):
    narrow = jax.jit(lambda x: apply(lambda target, x: target.narrow(x, dtype), x, dtype=dtype))
    expected = np.asarray(values).astype(NUMPY_DTYPES[dtype])
    np.testing.assert_array_equal(np.asarray(narrow(values)), expected)


def all_finite(dtype):
    values = np.arange(2**16, dtype=np.uint16).view(NUMPY_DTYPES[dtype])
    return np.where(np.isfinite(values.astype(np.float32)), values, np.zeros_like(values))


def test_plain_widening():
    for dtype in NUMPY_DTYPES:
        values = all_finite(dtype)
        found = np.asarray(PLAIN.widen(jnp.asarray(values)))
        np.testing.assert_array_equal(found, values.astype(np.float32))


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


@pytest.mark.parametrize("exponent", [133, -133, 64, 3, 0])
def test_powers_beyond_the_range_of_float32(exponent):
    """Not under jit, where XLA may make one factor of both."""
    x = jnp.asarray(np.array([1.5, -3.0], np.float32)) * 2.0 ** (-exponent // 2)
    found = PLAIN.times_power(x, exponent)
    np.testing.assert_array_equal(found, np.ldexp(np.asarray(x), exponent))


def test_outside_of_kernels_everything_is_plain_jnp():
    target = current_target()
    assert target is PLAIN
    assert (target.is_interpreted, target.has_ptx) == (True, False)
    with pytest.raises(NotImplementedError, match="Target has no inline PTX"):
        target.inline_ptx("mov.b32 $0, $1;", jnp.zeros(2, jnp.uint16), dtype=jnp.uint16)


def test_a_target_is_current_inside_its_block_alone():
    inner = Target()

    def fail():
        with tracing_for(inner):
            assert current_target() is inner
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert current_target() is PLAIN


@pytest.mark.parametrize("columns", [1, 5])
def test_a_column_broadcasts_to_a_tile(columns):
    column = PLAIN.column(jnp.arange(3.0), columns)
    tile = np.broadcast_to(np.arange(3.0)[:, None], (3, columns))
    np.testing.assert_array_equal(jnp.zeros((3, columns)) + column, tile)


class Toy(Target):
    """A backend that there is not: it has operations of its own, and no PTX."""

    def __init__(self):
        self.asked = set()

    def dot(self, a, b, *, trans_b=False):
        self.asked.add("dot")
        return jnp.einsum(
            "nk,mk->nm" if trans_b else "nk,km->nm", *(x.astype("float32") for x in (a, b))
        )

    def multiply_add(self, factor, other, addend):
        self.asked.add("multiply_add")
        return addend + other * factor

    def column(self, x, width):
        self.asked.add("column")
        return x.reshape(-1, 1)

    def exp2(self, x):
        self.asked.add("exp2")
        return jnp.exp(x * np.float32(np.log(2)))


def test_a_new_target_needs_no_other_kernels(rng):
    """The kernels' mathematics is as it was; what the target does its own way, they ask it for."""
    x = as_array(rng.standard_normal((3, 256)), "bfloat16")
    weight = quantize(as_array(rng.standard_normal((256, 32)), "float32"), "uint4:g32")
    toy, dtype = Toy(), jnp.dtype("float32")
    config = TritonConfig(16, 32, 1, 1, 2)
    with tracing_for(toy):
        product = gemm.matmul_terms.__wrapped__(x, weight, config, dtype, interpret=True)[0]
    expected = matmul(x, weight, implementation="reference", out_dtype=dtype)
    np.testing.assert_allclose(product, expected, rtol=2e-2, atol=0.2)
    assert toy.asked == {"dot", "multiply_add", "column"}
    terms = as_array(rng.standard_normal((1, 3, 64)), "float32")
    with tracing_for(toy):
        found = rowwise.gated.__wrapped__(terms, "silu", dtype, interpret=True)
    gate, up = np.split(wide(terms[0]), 2, axis=-1)
    np.testing.assert_allclose(found, gate / (1 + np.exp(-gate)) * up, rtol=1e-4, atol=1e-5)
    assert "exp2" in toy.asked
