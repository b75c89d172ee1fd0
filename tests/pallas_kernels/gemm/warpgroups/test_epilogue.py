from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpjax.kernels.gemm.plans.configuration import WarpgroupConfig
from mpjax.kernels.gemm.warpgroups.consumer import Consumer
from mpjax.kernels.gemm.warpgroups.epilogue import Epilogue
from mpjax.kernels.mosaic import WARPGROUP_OUTPUTS
from tests.pallas_kernels.gemm.warpgroups.programs import CODE_UNIT, interpreted_here, run_program
from tests.pallas_kernels.gemm.weights import integer_activations, integer_weight


@interpreted_here
@pytest.mark.parametrize("text", ["uint4:g128", "uint4:gK"])
@pytest.mark.parametrize(("warpgroups", "shares"), [(3, 1), (3, 3), (4, 2)])
def test_sums_of_the_same_outputs_are_joined_scaled_and_written(warpgroups, shares, text, rng):
    config = WarpgroupConfig(16, warpgroups, 1, shares)
    weight = integer_weight(rng, text, 512, config.tile_n)
    x = integer_activations(rng, weight, 16, "bfloat16")
    sums = (shares, warpgroups // shares, WARPGROUP_OUTPUTS, 16)

    def number(share, column):  # each another one
        shape = (WARPGROUP_OUTPUTS, 16)
        of_tile = jax.lax.broadcasted_iota(jnp.int32, shape, 0) * 16
        of_tile += jax.lax.broadcasted_iota(jnp.int32, shape, 1)
        return (of_tile + (share * 7 + column) * 1024).astype(jnp.float32)

    def end(program, column, share):
        summing = Consumer(program, column, share)
        Epilogue(program, summing, column, share).run([number(share, column)])

    found = run_program(end, weight, x, config, (1, 16, config.tile_n), copies=False)
    given = np.array([[number(s, c) for c in range(sums[1])] for s in range(shares)])
    expected = given.sum(0).reshape(config.tile_n, 16).T
    if text == "uint4:gK":
        expected = expected * np.asarray(weight.scales(), np.float32) * CODE_UNIT
    np.testing.assert_array_equal(found[0], expected)
