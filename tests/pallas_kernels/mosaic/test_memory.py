from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl

from mpjax.kernels.mosaic import memory
from mpjax.kernels.mosaic.launch import Grid, give_registers, launch, take_registers


@pytest.mark.parametrize(
    ("columns", "dtype", "swizzle", "tiled"),
    [(64, "bfloat16", 128, 64), (32, "uint16", 64, 32), (64, "float32", 128, 32)],
)
def test_tiles_are_swizzled_by_their_rows(columns, dtype, swizzle, tiled):
    tiling, swizzling = memory.shared((2, 16, columns), dtype).transforms
    assert (tiling.tiling, swizzling.swizzle) == ((8, tiled), swizzle)
    assert not memory.shared_rows((2, 16), dtype).transforms


def double_kernel(words_ref, out_ref, *, tiles, full):
    """Copies a tile [64, 64] in, doubles it, and writes it transposed."""

    @pl.when(jax.lax.axis_index("warpgroup") == 1)
    def _copy():
        give_registers()
        memory.copy_in(words_ref, tiles, full)

    @pl.when(jax.lax.axis_index("warpgroup") == 0)
    def _compute():
        take_registers(1)
        memory.wait(full)
        words = memory.load(tiles)
        memory.store_transposed(tiles, words + words)
        memory.copy_out(tiles, out_ref)
        memory.wait_for_stores()


def double_transposed(words: jax.Array) -> jax.Array:
    return launch(
        double_kernel,
        words,
        out_shape=jax.ShapeDtypeStruct((64, 64), jnp.bfloat16),
        grid=Grid({"one": 1}, 1),
        scratch={"tiles": memory.shared((64, 64), jnp.bfloat16), "full": memory.Barrier()},
        name="double_transposed",
        interpret=False,
    )


def test_a_tile_goes_through_registers(lower_for_cuda):
    text = lower_for_cuda(double_transposed, jax.ShapeDtypeStruct((64, 64), jnp.bfloat16))
    assert "mosaic_gpu" in text


@pytest.mark.gpu
def test_a_tile_goes_through_registers_on_the_gpu(rng, wgmma):
    words = jnp.asarray(rng.normal(size=(64, 64)), jnp.bfloat16)
    doubled = jax.jit(double_transposed)(words)
    np.testing.assert_array_equal(np.asarray(doubled), np.asarray(words.T + words.T))


def test_what_is_sent_to_another_program_has_no_barrier_of_several(lower_for_cuda):
    """JAX 0.11 would count its index twice, and the sums would be waited for in vain."""

    def kernel(x_ref, out_ref, *, tiles, received):
        sums = memory.zeros((64, 8), jnp.float32)
        warpgroup = jax.lax.axis_index("warpgroup")
        memory.send(sums, tiles.at[warpgroup], received.at[warpgroup], axis="split")

    def run(x):
        return launch(
            kernel,
            x,
            out_shape=jax.ShapeDtypeStruct((64, 8), jnp.float32),
            grid=Grid({"row": 1}, 1, {"split": 2}),
            scratch={
                "tiles": memory.shared((2, 64, 8), jnp.float32),
                "received": memory.Barrier(num_barriers=2),
            },
            name="send",
            interpret=False,
        )

    with pytest.raises(AssertionError, match="counts the index"):
        lower_for_cuda(run, jax.ShapeDtypeStruct((64, 8), jnp.float32))
