from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpjax.kernels import quantize
from mpjax.kernels.experts.kernels import find_tiles, in_packed_order, why_not
from mpjax.kernels.experts.plans import ExpertsConfig, ExpertsWarpgroupConfig, Problem
from mpjax.kernels.experts.tiles import sorted_by_expert
from tests.pallas_kernels.experts.cases import EXPERTS, ROUTINGS

X = jax.ShapeDtypeStruct((300, 256), jnp.bfloat16)


def struct(text: str) -> Any:
    array = jax.ShapeDtypeStruct((8, 256, 128), jnp.bfloat16)
    return array if text == "bfloat16" else jax.eval_shape(lambda w: quantize(w, text), array)


def reason(name: str, weight: Any, x: Any = X) -> str | None:
    return why_not(name, Problem.of((300, 2), weight, gated=True), x, weight)


def test_reasons_of_each_kernel(pretend_gpu):
    packed, plain = struct("uint4:g128"), struct("bfloat16")
    assert [reason(name, packed) for name in ("triton", "mosaic")] == [None, None]
    assert reason("triton", plain) is None
    assert reason("mosaic", plain) is None
    wide = dataclasses.replace(packed, scale_dtype="bfloat16")
    half = jax.ShapeDtypeStruct(X.shape, jnp.float16)
    assert reason("mosaic", wide) is None
    assert reason("mosaic", plain, half) == (
        "x is float16 and the weight bfloat16, expected one dtype"
    )
    assert reason("mosaic", wide, half) == "scales are bfloat16, whose range float16 does not have"
    single = jax.ShapeDtypeStruct(X.shape, jnp.float32)
    for name in ("triton", "mosaic"):
        assert reason(name, packed, single) == "x is float32, expected bfloat16 or float16"


@pytest.mark.parametrize(
    "config", [ExpertsConfig(16, 32, 1, 2, 2), ExpertsWarpgroupConfig(48, 2, 1)], ids=str
)
def test_tiles_are_found_as_a_configuration_says(config):
    experts = jnp.asarray(ROUTINGS["mixed"])
    found = find_tiles(experts, EXPERTS, config)
    expected = sorted_by_expert(experts, EXPERTS, config.tile_m)
    np.testing.assert_array_equal(found.pairs, expected.pairs)


def test_channels_come_in_the_order_of_each_expert(rng):
    weight = quantize(jnp.ones((EXPERTS, 128, 64)), "uint4:g128")
    order = jnp.asarray(rng.permuted(np.tile(np.arange(128), (EXPERTS, 1)), axis=1), jnp.int32)
    x, experts = jnp.arange(640.0).reshape(5, 128), jnp.asarray(ROUTINGS["mixed"])
    ordered = dataclasses.replace(weight, permutation=order)
    rows, plain = in_packed_order(x.astype(jnp.bfloat16), ordered, experts, None)
    assert plain.permutation is None
    assert rows.shape == (10, 128)
    np.testing.assert_array_equal(rows[3], x.astype(jnp.bfloat16)[1][order[experts[1, 1]]])
