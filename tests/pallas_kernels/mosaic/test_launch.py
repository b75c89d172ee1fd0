from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl

from mpjax.kernels.gemm.plans.configuration import WarpgroupConfig
from mpjax.kernels.gemm.warpgroups.launch import matmul_terms
from mpjax.kernels.mosaic import memory
from mpjax.kernels.mosaic.decoding import Warpgroups
from mpjax.kernels.mosaic.launch import (
    PRODUCER_REGISTERS,
    Grid,
    launch,
    registers_per_thread,
    why_slow,
)
from mpjax.kernels.target import PLAIN, Target, current_target, tracing_for
from tests.pallas_kernels.gemm.warpgroups.programs import interpreted_here
from tests.pallas_kernels.gemm.weights import weight_struct

REGISTERS_OF_A_MULTIPROCESSOR = 65536


@pytest.mark.parametrize("warpgroups", [1, 2, 3, 4])
def test_no_thread_waits_for_registers_that_are_not_there(warpgroups):
    threads = 128 * (warpgroups + 1)
    given = REGISTERS_OF_A_MULTIPROCESSOR // threads // 8 * 8  # by the launch, to each thread
    taken = warpgroups * registers_per_thread(warpgroups) + PRODUCER_REGISTERS
    assert taken <= given * (warpgroups + 1)
    assert registers_per_thread(warpgroups) % 8 == 0, "as `setmaxnreg` takes them"
    assert registers_per_thread(warpgroups) <= 256, "likewise"


def test_threads_get_their_registers_before_jax_0_12():
    assert why_slow((0, 11, 2)) is None
    assert "jax<0.12" in why_slow((0, 12, 0))


def copied(x: jax.Array, seen: list | None = None, *, interpret: bool = False) -> jax.Array:
    """X [64, 64] by way of shared memory; what its kernel was traced for is added to `seen`."""

    def kernel(x_ref, out_ref, *, tile, full):
        if seen is not None:
            seen.append(current_target())

        @pl.when(jax.lax.axis_index("warpgroup") == 1)
        def _copy():
            memory.copy_in(x_ref, tile, full)

        @pl.when(jax.lax.axis_index("warpgroup") == 0)
        def _compute():
            memory.wait(full)
            memory.copy_out(tile, out_ref)
            memory.wait_for_stores()

    return launch(
        kernel,
        x,
        out_shape=jax.ShapeDtypeStruct((64, 64), x.dtype),
        grid=Grid({"one": 1}, 1),
        scratch={"tile": memory.shared((64, 64), x.dtype), "full": memory.Barrier()},
        name="copied",
        interpret=interpret,
    )


def test_the_target_is_that_of_the_launch(lower_for_cuda):
    seen = []
    struct = jax.ShapeDtypeStruct((64, 64), jnp.bfloat16)
    assert "mosaic_gpu" in lower_for_cuda(functools.partial(copied, seen=seen), struct)
    assert {type(target) for target in seen} == {Warpgroups}
    assert current_target() is PLAIN


@interpreted_here
def test_an_interpreted_kernel_is_traced_for_the_target_around_it(rng):
    seen, around = [], Target()
    x = jnp.asarray(rng.normal(size=(64, 64)), jnp.bfloat16)
    with tracing_for(around):
        found = copied(x, seen, interpret=True)
    np.testing.assert_array_equal(np.asarray(found), np.asarray(x))
    assert set(seen) == {around}


@pytest.mark.parametrize("axis", [None, "device"])
def test_a_result_differs_along_the_axes_of_its_arguments(axis, lower_for_cuda):
    """JAX refuses to take a result of `shard_map` for replicated that differs."""
    mesh = jax.sharding.AbstractMesh((1,), ("device",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec(axis)
    run = jax.shard_map(copied, mesh=mesh, in_specs=spec, out_specs=jax.sharding.PartitionSpec())
    words = jax.ShapeDtypeStruct((64, 64), jnp.bfloat16)
    if axis is None:
        assert jax.eval_shape(run, words).shape == (64, 64)
    else:
        with pytest.raises(ValueError, match=r"replication|out_specs"):
            jax.eval_shape(run, words)


def test_kernels_count_in_32_bits_where_jax_counts_in_64(lower_for_cuda):
    weight, x = weight_struct("uint4:g128", 512, 128), jax.ShapeDtypeStruct((40, 512), jnp.bfloat16)
    config, dtype = WarpgroupConfig(40, 2, 1), jnp.dtype(jnp.bfloat16)
    multiply = functools.partial(matmul_terms, config=config, out_dtype=dtype)
    with jax.enable_x64(True):
        assert "mosaic_gpu" in lower_for_cuda(multiply, x, weight)
