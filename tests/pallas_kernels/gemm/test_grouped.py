from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import pytest

from mpjax.kernels import Gate, quantize
from mpjax.kernels.gemm import grouped
from mpjax.kernels.gemm.plans import WarpgroupConfig
from mpjax.kernels.gemm.warpgroups import launch
from tests.pallas_kernels.gemm.warpgroups.programs import interpreted_here
from tests.pallas_kernels.oracles import GATES, random_array, relative_error, wide

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
