from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpjax.kernels import WeightFormat, grid, quantize, unpack
from mpjax.kernels.plain_codes import in_groups, operands
from tests.sweeps import in_sweep

FORMATS = (
    *("uint4:g32", "uint8:gK", "uint4:g64:sym", "table4:g32", "table3:g64", "table2:g32"),
    *("float8:gK", "float8:g128", "int8/int8", "liquid4:g64/int8"),
)


# Integers, a table whose words have narrow planes, scales of blocks, and scales of two levels.
SOME = ("uint4:g64:sym", "table3:g64", "float8:g128", "liquid4:g64/int8")


@pytest.fixture(params=[text if text in SOME else in_sweep(text) for text in FORMATS])
def format(request):
    return WeightFormat.parse(request.param)


@pytest.fixture
def weight(rng):
    return jnp.asarray(rng.standard_normal((128, 6)), jnp.float32)


def test_quantize_fits_and_rounds(format, weight):
    plain = jax.jit(lambda w: grid.fit(w, format).round(w))(weight)
    packed = unpack(quantize(weight, format))
    for found, expected in ((plain.codes, packed.codes), (plain.scales, packed.scales)):
        np.testing.assert_array_equal(found.astype(jnp.float32), expected.astype(jnp.float32))


@pytest.mark.one_of(2)
def test_no_other_code_is_nearer(format, weight, rng):
    """Values are within the range, and differ from those that the grid was fitted to."""
    fitted = grid.fit(weight, format)
    values = weight * jnp.asarray(rng.uniform(0.2, 0.9, weight.shape), jnp.float32)
    plain = fitted.round(values)
    error = np.abs(plain.dequantize() - values)
    if plain.codes.dtype == jnp.float8_e4m3fn:
        bits = jax.lax.bitcast_convert_type(plain.codes, jnp.uint8)
        others = [jax.lax.bitcast_convert_type(bits + step, plain.codes.dtype) for step in (1, -1)]
    else:
        top = 127 if plain.codes.dtype == jnp.int8 else 2**format.bits - 1
        wide = plain.codes.astype(jnp.int32)
        others = [
            jnp.clip(wide + step, -top if plain.codes.dtype == jnp.int8 else 0, top).astype(
                plain.codes.dtype
            )
            for step in (1, -1)
        ]
    for codes in others:
        other = np.abs(fitted.with_codes(codes).dequantize() - values)
        # Two levels of rounding may choose the second nearest, by a step of the first at most.
        slack = 1.01 * np.abs(weight).max() / 119 if format.codes == "liquid4" else 1e-6
        assert (error <= other + slack).all()


def test_rows_are_those_of_the_whole(format, weight):
    fitted = grid.fit(weight, format)
    plain = fitted.round(weight)
    values = plain.dequantize()
    for index in (0, 70, 127):
        row = fitted.row(fitted.group_of(jnp.asarray(index)))
        codes = row.nearest(weight[index])
        np.testing.assert_array_equal(
            np.asarray(codes, np.float32), np.asarray(plain.codes[index], np.float32)
        )
        np.testing.assert_array_equal(row.decode(codes), values[index])


def test_a_cut_group_is_padded(rng):
    format = WeightFormat.parse("float8:g128")
    weight = jnp.asarray(rng.standard_normal((200, 3)), jnp.float32)
    assert in_groups(weight, format).shape == (2, 128, 3)
    assert grid.fit(weight, format).round(weight).shape == (200, 3)


def test_operands_are_what_is_multiplied(weight):
    for text in ("int8/int8", "liquid4:g64/int8"):
        plain = grid.fit(weight, WeightFormat.parse(text)).round(weight)
        scales = plain.scales[0] if plain.channel_scales is None else plain.channel_scales
        found = operands(plain)
        assert found.dtype == jnp.int8
        np.testing.assert_allclose(found.astype(jnp.float32) * scales[None], plain.dequantize())
