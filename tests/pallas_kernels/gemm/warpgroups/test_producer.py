from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl

from mpjax.kernels.gemm.plans.configuration import WarpgroupConfig
from mpjax.kernels.mosaic import WARPGROUP_OUTPUTS, memory
from tests.pallas_kernels.gemm.warpgroups.programs import interpreted_here, run_program
from tests.pallas_kernels.gemm.weights import random_activations, random_weight


@pytest.mark.one_of(3)
@interpreted_here
@pytest.mark.parametrize("what", ["words", "x", "parameters"])
@pytest.mark.parametrize("config", [WarpgroupConfig(16, 2, 1), WarpgroupConfig(8, 4, 1, 2)])
def test_every_block_comes_in_its_turn(config, what, rng):
    """More blocks than there are slots, so that each has to be free again."""
    blocks = 11
    weight = random_weight(rng, "uint4:g128", 256 * blocks, 128)
    x = random_activations(rng, weight, config.tile_m, "bfloat16")
    expected = {
        "words": weight.words,  # [blocks, N, width]
        "x": jnp.stack(jnp.split(x, blocks, 1)),  # [blocks, M, 256]
        "parameters": weight.parameters.reshape(blocks, -1, 128),
    }[what]

    def note(program, column, share):
        call, shared, out = program.call, program.shared, program.arguments.out
        own = pl.ds(column * WARPGROUP_OUTPUTS, WARPGROUP_OUTPUTS)

        def look(number, _):
            place = program.slot(share, number, call.stages.blocks)
            memory.wait(shared.full.at[place])
            block = number * call.config.shares + share
            if what == "words":
                out[block, own, :] = shared.word_tiles[place, own, :].astype(out.dtype)
            elif what == "x":
                out[block] = shared.x_tiles[place].astype(out.dtype)
            else:  # 24 bits are what float32 holds
                found = shared.parameter_tiles[place, :, own] >> jnp.uint32(8)
                out[block, :, own] = found.astype(out.dtype)
            memory.arrive(shared.free.at[place])

        shares = call.config.shares
        jax.lax.fori_loop(0, (blocks - share + shares - 1) // shares, look, None)

    found = run_program(note, weight, x, config, expected.shape)
    if what == "parameters":
        expected = expected >> jnp.uint32(8)
    np.testing.assert_array_equal(found, np.asarray(expected.astype(jnp.float32)))
