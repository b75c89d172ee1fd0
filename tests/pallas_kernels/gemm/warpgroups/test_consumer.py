from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from mpjax.kernels.gemm.plans.configuration import WarpgroupConfig
from mpjax.kernels.gemm.warpgroups.consumer import Consumer
from mpjax.kernels.mosaic import WARPGROUP_OUTPUTS
from tests.pallas_kernels.gemm.warpgroups.programs import CODE_UNIT, interpreted_here, run_program
from tests.pallas_kernels.gemm.weights import dense, exact, integer_activations, integer_weight


def sums_of(weight, x, config, *, scaled=False):
    """[shares, columns, 64, rows] of the first tile of outputs."""
    columns = config.warpgroups // config.shares

    def compute(program, column, share):
        summing = Consumer(program, column, share)
        [sums] = summing.run()
        if scaled:
            sums = summing.scaled(sums, summing.output_parameters)
        program.arguments.out[share, column] = sums.astype(jnp.float32)

    shape = (config.shares, columns, WARPGROUP_OUTPUTS, config.tile_m)
    return np.asarray(run_program(compute, weight, x, config, shape))


@interpreted_here
@pytest.mark.parametrize(
    ("text", "config"),
    [
        ("uint4:g128", WarpgroupConfig(16, 2, 1)),  # sums are scaled
        ("uint4:g64", WarpgroupConfig(8, 4, 1, 2)),  # and shared
        ("uint4:g128", WarpgroupConfig(40, 2, 1)),  # weights are
    ],
)
def test_each_share_sums_its_blocks(text, config, rng):
    blocks = 5
    weight = integer_weight(rng, text, 256 * blocks, config.tile_n)
    x = integer_activations(rng, weight, config.tile_m, "bfloat16")
    matrix, rows = dense(weight), exact(x)
    expected = np.zeros((config.shares, config.tile_n, config.tile_m))
    for block in range(blocks):
        channels = slice(256 * block, 256 * (block + 1))
        expected[block % config.shares] += (rows[:, channels] @ matrix[channels]).T
    found = sums_of(weight, x, config)
    np.testing.assert_array_equal(found.reshape(expected.shape), expected)


@interpreted_here
def test_scales_of_whole_channels_are_left_to_the_caller(rng):
    config = WarpgroupConfig(16, 2, 1)
    weight = integer_weight(rng, "uint4:gK", 512, 128)
    x = integer_activations(rng, weight, 16, "bfloat16")
    expected = (exact(x) @ dense(weight)).T.reshape(1, 2, WARPGROUP_OUTPUTS, 16)
    np.testing.assert_array_equal(sums_of(weight, x, config, scaled=True), expected)
    scales = np.asarray(weight.scales(), np.float64).reshape(1, 2, WARPGROUP_OUTPUTS, 1)
    assert (scales != 1).any()
    np.testing.assert_array_equal(sums_of(weight, x, config) * scales * CODE_UNIT, expected)
