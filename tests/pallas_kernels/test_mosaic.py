from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl

from mpjax.kernels import mosaic
from mpjax.kernels.gemm.config import WarpgroupConfig
from mpjax.kernels.gemm.mosaic import matmul_terms
from tests.pallas_kernels.gemm.weights import weight_struct

REGISTERS_OF_A_MULTIPROCESSOR = 65536


@pytest.mark.parametrize("warpgroups", [1, 2, 3, 4])
def test_no_thread_waits_for_registers_that_are_not_there(warpgroups):
    threads = 128 * (warpgroups + 1)
    given = REGISTERS_OF_A_MULTIPROCESSOR // threads // 8 * 8  # by the launch, to each thread
    taken = warpgroups * mosaic.registers_per_thread(warpgroups) + mosaic.COPYING_REGISTERS
    assert taken <= given * (warpgroups + 1)
    assert mosaic.registers_per_thread(warpgroups) % 8 == 0, "as `setmaxnreg` takes them"
    assert mosaic.registers_per_thread(warpgroups) <= 256, "likewise"


def test_threads_get_their_registers_before_jax_0_12():
    assert mosaic.why_slow((0, 11, 2)) is None
    assert "jax<0.12" in mosaic.why_slow((0, 12, 0))


@pytest.mark.parametrize(
    ("columns", "dtype", "swizzle", "tiled"),
    [(64, "bfloat16", 128, 64), (32, "uint16", 64, 32), (64, "float32", 128, 32)],
)
def test_tiles_are_swizzled_by_their_rows(columns, dtype, swizzle, tiled):
    tiling, swizzling = mosaic.shared((2, 16, columns), dtype).transforms
    assert (tiling.tiling, swizzling.swizzle) == ((8, tiled), swizzle)
    assert not mosaic.shared_rows((2, 16), dtype).transforms


@pytest.mark.parametrize("axis", [None, "device"])
def test_a_result_differs_along_the_axes_of_its_arguments(axis, lower_for_cuda):
    """JAX refuses to take a result of `shard_map` for replicated that differs."""
    mesh = jax.sharding.AbstractMesh((1,), ("device",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec(axis)
    run = jax.shard_map(
        double_transposed, mesh=mesh, in_specs=spec, out_specs=jax.sharding.PartitionSpec()
    )
    words = jax.ShapeDtypeStruct((64, 64), jnp.bfloat16)
    if axis is None:
        assert jax.eval_shape(run, words).shape == (64, 64)
    else:
        with pytest.raises(ValueError, match=r"replication|out_specs"):
            jax.eval_shape(run, words)


def double_kernel(words_ref, out_ref, *, tiles, full):
    """Copies a tile [64, 64] in, doubles it, and writes it transposed."""

    @pl.when(jax.lax.axis_index("warpgroup") == 1)
    def _copy():
        mosaic.give_registers()
        mosaic.copy_in(words_ref, tiles, full)

    @pl.when(jax.lax.axis_index("warpgroup") == 0)
    def _compute():
        mosaic.take_registers(1)
        mosaic.wait(full)
        words = mosaic.load(tiles, interpret=False)
        mosaic.store_transposed(tiles, words + words, interpret=False)
        mosaic.copy_out(tiles, out_ref)
        mosaic.wait_for_stores()


def double_transposed(words: jax.Array) -> jax.Array:
    return mosaic.launch(
        double_kernel,
        words,
        out_shape=jax.ShapeDtypeStruct((64, 64), jnp.bfloat16),
        grid={"one": 1},
        warpgroups=1,
        scratch={"tiles": mosaic.shared((64, 64), jnp.bfloat16), "full": mosaic.Barrier()},
        name="double_transposed",
        interpret=False,
    )


def test_a_tile_goes_through_registers(lower_for_cuda):
    text = lower_for_cuda(double_transposed, jax.ShapeDtypeStruct((64, 64), jnp.bfloat16))
    assert "mosaic_gpu" in text


def test_kernels_count_in_32_bits_where_jax_counts_in_64(lower_for_cuda):
    weight, x = weight_struct("uint4:g128", 512, 128), jax.ShapeDtypeStruct((40, 512), jnp.bfloat16)
    config, dtype = WarpgroupConfig(40, 2, 1), jnp.dtype(jnp.bfloat16)
    multiply = functools.partial(matmul_terms, config=config, out_dtype=dtype)
    with jax.enable_x64(True):
        assert "mosaic_gpu" in lower_for_cuda(multiply, x, weight)


@pytest.mark.gpu
def test_a_tile_goes_through_registers_on_the_gpu(rng, wgmma):
    words = jnp.asarray(rng.normal(size=(64, 64)), jnp.bfloat16)
    doubled = jax.jit(double_transposed)(words)
    np.testing.assert_array_equal(np.asarray(doubled), np.asarray(words.T + words.T))


def test_what_is_sent_to_another_program_has_no_barrier_of_several(lower_for_cuda):
    """JAX 0.11 would count its index twice, and the sums would be waited for in vain."""

    def kernel(x_ref, out_ref, *, tiles, received):
        sums = mosaic.zeros((64, 8), jnp.float32, interpret=False)
        warpgroup = jax.lax.axis_index("warpgroup")
        mosaic.send(sums, tiles.at[warpgroup], received.at[warpgroup], axis="split")

    def run(x):
        return mosaic.launch(
            kernel,
            x,
            out_shape=jax.ShapeDtypeStruct((64, 8), jnp.float32),
            grid={"row": 1},
            cluster={"split": 2},
            warpgroups=1,
            scratch={
                "tiles": mosaic.shared((2, 64, 8), jnp.float32),
                "received": mosaic.Barrier(num_barriers=2),
            },
            name="send",
            interpret=False,
        )

    with pytest.raises(AssertionError, match="counts the index"):
        lower_for_cuda(run, jax.ShapeDtypeStruct((64, 8), jnp.float32))
