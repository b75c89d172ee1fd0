"""Programs of the warpgroup kernel: shared memory, tiles of experts, integer sums."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpjax.kernels import Gate, quantize
from mpjax.kernels.gemm import grouped
from mpjax.kernels.gemm.integer_sums import OFFSET_BITS, as_float, scaled, without_last_bits
from mpjax.kernels.gemm.plans.configuration import WarpgroupConfig
from mpjax.kernels.gemm.warpgroups import launch
from mpjax.kernels.target import Target, tracing_for
from tests.pallas_kernels.marks import interpreted_here
from tests.pallas_kernels.oracles import GATES, random_array, relative_error, wide

FORMATS = (
    "uint4:g128",
    "uint4:g32",
    "uint8:gK",
    "float8:g128",
    "table4:g64",
    "table3:g64",
)
FORMATS = (
    *FORMATS,
    "int8/int8",
    "liquid4:g64/int8",
    "int4:g128/int8",
    "float4:g32",
    "bfloat16",
)


EXPERTS = [2, 0, 2, -1, 1]  # of tiles; any order will do


@interpreted_here
def test_tiles_in_bands(rng, monkeypatch):
    """The last band has fewer tiles; a tile without an expert is passed over."""
    monkeypatch.setattr(launch, "BAND_BYTES", 2 * 40 * 256 * 2)
    weight = quantize(random_array(rng, (3, 256, 64), "float32"), "uint4:g128")
    x, bias = random_array(rng, (200, 256), "bfloat16"), random_array(rng, (3, 64), "float32")
    weights = random_array(rng, (200,), "float32")
    tiles = grouped.Tiles(jnp.array(EXPERTS, jnp.int32), bias, None, weights)
    config = WarpgroupConfig(40, 2, 1)
    found = grouped.products(x, weight, tiles, config, jnp.dtype("float32"), interpret=True)
    dense = wide(weight.dequantize())
    for tile, expert in enumerate(EXPERTS):
        rows = slice(40 * tile, 40 * (tile + 1))
        if expert >= 0:
            whole = (wide(x)[rows] @ dense[expert] + wide(bias)[expert]) * wide(weights)[rows, None]
            assert relative_error(found[rows], whole) < GATES["bfloat16"]


@pytest.mark.parametrize("outputs", [128, 320])
def test_lowers_with_a_gate(outputs, lower_for_cuda):
    """Also where the last tile sticks out."""
    weight = jax.ShapeDtypeStruct((3, 512, 2 * outputs), jnp.bfloat16)
    weight = jax.eval_shape(lambda w: quantize(w, "uint4:g128"), weight)
    x, experts = (
        jax.ShapeDtypeStruct(shape, dtype)
        for shape, dtype in (((5 * 128, 512), jnp.bfloat16), ((5,), jnp.int32))
    )
    config = WarpgroupConfig(128, 2, 1)
    multiply = functools.partial(grouped.products, config=config, out_dtype=jnp.dtype("bfloat16"))

    def run(x, weight, experts):
        return multiply(x, weight, grouped.Tiles(experts, gate=Gate()))

    assert jax.eval_shape(run, x, weight, experts).shape == (640, outputs)
    assert "experts_warpgroups_uint4" in lower_for_cuda(run, x, weight, experts)


@pytest.mark.any_version
def test_every_sum_below_two_to_the_22_is_exact(rng):
    ends = np.array([-(2**22) + 1, -1, 0, 1, 2**22 - 1], np.int32)
    sums = np.concatenate([ends, rng.integers(ends[0], ends[-1], 10_000, np.int32)])
    found = as_float(jnp.asarray(sums + np.int32(OFFSET_BITS)))
    assert found.dtype == jnp.float32
    np.testing.assert_array_equal(found, sums)


class Fused(Target):
    """A target whose multiply-add rounds once."""

    is_interpreted = False

    def multiply_add(self, factor, other, addend):
        """In float64, which holds products of two float32 numbers."""
        wide = (np.asarray(each, np.float64) for each in (factor, other, addend))
        factor, other, addend = wide
        return (factor * other + addend).astype(np.float32)


@pytest.mark.any_version
@pytest.mark.parametrize("target", [Target(), Fused()])
def test_scaled_sums_are_rounded_once(target, rng):
    sums = rng.integers(-(2**22) + 1, 2**22, 10_000, np.int32)
    given = (10.0 ** rng.uniform(-20, 20, len(sums))).astype(np.float32)
    scales = np.asarray(without_last_bits(jnp.asarray(given.view(np.uint32)))).view(np.float32)
    assert (np.abs(scales / given.astype(np.float64) - 1) < 2.0**-21).all()
    assert (scales != given).any()
    with tracing_for(target):
        found = scaled(jnp.asarray(sums + np.int32(OFFSET_BITS)), jnp.asarray(scales))
    np.testing.assert_array_equal(found, (sums * scales.astype(np.float64)).astype(np.float32))
