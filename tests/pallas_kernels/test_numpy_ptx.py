"""The interpreter that other tests trust."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from tests.pallas_kernels import numpy_ptx as ptx

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


def run(assembly: str, *operands: int) -> int:
    [result] = ptx.run(assembly, [np.array([operand], np.uint32) for operand in operands])
    return int(result)


@pytest.mark.parametrize(
    ("selector", "expected"),
    [
        (0x3210, 0x83828180),
        (0x7654, 0x07060504),
        (0x5140, 0x05810480),
        (0x0001, 0x80808081),
        # The highest bit of a nibble repeats the sign of the byte that the others choose.
        (0x8888, 0xFFFFFFFF),
        (0xC4BF, 0x0004FF00),
        (0xFFFF3210, 0x83828180),  # only sixteen bits select
    ],
)
def test_permute(selector, expected):
    assert run("prmt.b32 $0, $1, $2, $3;", 0x83828180, 0x07060504, selector) == expected


@pytest.mark.parametrize(
    ("table", "expected"),
    [
        (0xEA, lambda a, b, c: a & b | c),
        (0x6A, lambda a, b, c: (a & b) ^ c),
        (0x96, lambda a, b, c: a ^ b ^ c),
        (0xCA, lambda a, b, c: a & b | ~a & c),
    ],
)
def test_logic_of_three(table, expected, rng):
    a, b, c = (int(x) for x in rng.integers(0, 2**32, 3))
    assert run(f"lop3.b32 $0, $1, $2, $3, 0x{table:X};", a, b, c) == expected(a, b, c) % 2**32


@pytest.mark.parametrize(
    ("assembly", "expected"),
    [
        ("shr.b32 $0, $1, 4;", 0x0F234567),
        ("shl.b32 $0, $1, 4;", 0x23456780),
        ("shl.b32 $0, $1, 32;", 0),
        ("shl.b32 $0, $1, $2;", 0x23456780),
        ("and.b32 $0, $1, 0xFF;", 0x78),
        ("xor.b32 $0, $1, 0x80808080;", 0x72B4D6F8),
        ("mad.lo.u32 $0, $1, 0x10, $2;", 0x23456784),
        ("{ .reg .b32 s, t; mov.b32 s, $1; or.b32 t, s, $2; not.b32 $0, t; }", 0x0DCBA983),
    ],
)
def test_integers(assembly, expected):
    assert run(assembly, 0xF2345678, 4) == expected


@pytest.mark.parametrize(("half", "dtype"), [("bf16x2", BFLOAT16), ("f16x2", np.dtype(np.float16))])
def test_fused_multiply_add_rounds_once(half, dtype, rng):
    x, y = (rng.standard_normal((2, 10_000)) * 8).astype(dtype)
    # Sums that almost cancel: rounding the product too would lose them.
    z = (-x.astype(np.float64) * y.astype(np.float64)).astype(np.float32).astype(dtype)
    exact = x.astype(np.float64) * y.astype(np.float64) + z.astype(np.float64)
    operands = [array.view(np.uint32) for array in (x, y, z)]
    result = ptx.run(f"fma.rn.{half} $0, $1, $2, $3;", operands).view(dtype)
    # float32 holds these differences, so that numpy's conversion rounds once.
    np.testing.assert_array_equal(exact.astype(np.float32), exact)
    np.testing.assert_array_equal(result, exact.astype(np.float32).astype(dtype))


@pytest.mark.parametrize(("half", "dtype"), [(ptx.BFLOAT16, BFLOAT16), (ptx.FLOAT16, np.float16)])
def test_halves_are_read_and_rounded(half, dtype):
    bits = np.arange(2**16, dtype=np.uint16)
    with np.errstate(invalid="ignore"):
        expected = bits.view(dtype).astype(np.float64)
    values = half.values(bits)
    np.testing.assert_array_equal(values, expected)
    numbers = bits[~np.isnan(values)]
    np.testing.assert_array_equal(half.bits(half.values(numbers)), numbers)
    # Halfway between neighbours, the even one; past halfway, the farther.
    low = np.arange((2**half.exponent_bits - 1) << half.mantissa_bits, dtype=np.uint16)[:-1]
    middle = (half.values(low) + half.values(low + 1)) / 2
    np.testing.assert_array_equal(half.bits(middle), low + low % 2)
    np.testing.assert_array_equal(half.bits(np.nextafter(middle, np.inf)), low + 1)
    np.testing.assert_array_equal(half.bits(-np.nextafter(middle, 0)), low | 0x8000)


def test_registers_hold_neighbours():
    first = jnp.arange(4, dtype=jnp.uint16).reshape(1, 4)
    wide = (jnp.arange(4, dtype=jnp.uint32) + 100).reshape(1, 4)
    [narrow] = ptx.registers(first, first)
    np.testing.assert_array_equal(narrow, [0x00010000, 0x00030002])
    even, odd = ptx.registers(wide, first)
    np.testing.assert_array_equal(even, [100, 102])
    np.testing.assert_array_equal(odd, [101, 103])
    [four] = ptx.registers(jnp.arange(4, dtype=jnp.uint8), jnp.zeros(4, jnp.int8))
    np.testing.assert_array_equal(four, [0x03020100])


def test_arguments_of_wider_elements_fill_more_operands():
    first = jnp.asarray([1, 2, 3, 4], jnp.uint16)
    wide = jnp.asarray([0x10, 0x20, 0x30, 0x40], jnp.uint32)

    @jax.jit
    def second_of_each_pair(first, wide):
        return ptx.NumpyPTX().inline_ptx("or.b32 $0, $1, $3;", first, wide, dtype=jnp.int16)

    result = second_of_each_pair(first, wide)
    assert result.dtype == jnp.int16
    np.testing.assert_array_equal(result, [0x21, 2, 0x43, 4])


@pytest.mark.parametrize(
    ("assembly", "error", "message"),
    [
        ("vadd4.u32 $0, $1, $2;", NotImplementedError, "'vadd4.u32'"),
        ("mov.b32 $0, $3;", NameError, r"'\$3' is read before it is written"),
        ("{ .reg .b32 t; mov.b32 $0, t; }", NameError, "'t' is read before"),
        ("{ mov.b32 t, $1; mov.b32 $0, t; }", AssertionError, "'t' is not declared"),
        (".reg .b32 t; mov.b32 t, $1; mov.b32 $0, t;", AssertionError, "outside of braces"),
        ("{ .reg .b32 t; .reg .b32 t; }", AssertionError, "twice"),
        (
            "{ .reg .b32 a, b, c; mov.b32 a, 0x7F007F00; mov.b32 b, 0x3F803F80; "
            "mov.b32 c, 0x00010001; fma.rn.bf16x2 $0, a, b, c; }",
            NotImplementedError,
            "float64",
        ),
        ("fma.rn.bf16x2 $0, $1, 0x3F803F80, $2;", ValueError, "registers alone"),
    ],
)
def test_what_is_unknown_is_refused(assembly, error, message):
    with pytest.raises(error, match=message):
        run(assembly, 1, 2)


@pytest.mark.parametrize(("dtype", "exponent"), [("bfloat16", -133), ("float16", -24)])
def test_subnormals_count(dtype, exponent):
    """In products and where float32 is narrowed, to even where it lies between two."""
    bits = jnp.arange(1, 5, dtype=jnp.uint16).reshape(2, 2)
    codes = jax.lax.bitcast_convert_type(bits, jnp.dtype(dtype))
    powers, target = jnp.full((3, 2), 2.0**7, dtype), ptx.WithSubnormals()
    products = np.ldexp(128.0 * np.array([[3, 3, 3], [7, 7, 7]]), exponent).astype(np.float32)
    np.testing.assert_array_equal(target.dot(codes, powers, trans_b=True), products)
    np.testing.assert_array_equal(target.dot(codes, powers.T), products)
    small = jnp.asarray(np.ldexp([1.0, 1.5, 2.5, 3.0], -24).astype(np.float32))
    if dtype == "float16":
        narrow = np.asarray(target.narrow(small, dtype)).view(np.uint16)
        np.testing.assert_array_equal(narrow, [1, 2, 2, 3])
        widened = target.widen(jax.lax.bitcast_convert_type(bits, jnp.float16))
        np.testing.assert_array_equal(widened, np.ldexp([[1.0, 2], [3, 4]], -24))


def test_powers_beyond_those_of_float32():
    x = jnp.asarray(np.ldexp([1.0, -3.0], -100), jnp.float32)
    found = ptx.WithSubnormals().times_power(x, 150)
    np.testing.assert_array_equal(found, np.ldexp([1.0, -3.0], 50))
