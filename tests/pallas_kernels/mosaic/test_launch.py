from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import pytest

from mpjax.kernels.gemm.plans.configuration import WarpgroupConfig
from mpjax.kernels.gemm.warpgroups.launch import matmul_terms
from mpjax.kernels.mosaic import memory
from mpjax.kernels.mosaic.launch import (
    PRODUCER_REGISTERS,
    Grid,
    can_give_registers,
    launch,
    registers_per_thread,
    why_slow,
)
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
    assert can_give_registers((0, 11, 2))
    assert not can_give_registers((0, 12, 0))
    assert (why_slow() is None) == can_give_registers()


def test_kernels_count_in_32_bits_where_jax_counts_in_64(lower_for_cuda):
    weight, x = weight_struct("uint4:g128", 512, 128), jax.ShapeDtypeStruct((40, 512), jnp.bfloat16)
    config, dtype = WarpgroupConfig(40, 2, 1), jnp.dtype(jnp.bfloat16)
    multiply = functools.partial(matmul_terms, config=config, out_dtype=dtype)
    with jax.enable_x64(True):
        assert "mosaic_gpu" in lower_for_cuda(multiply, x, weight)


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
