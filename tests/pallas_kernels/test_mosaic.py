from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl

from pallas_kernels import backend, mosaic

REGISTERS_OF_A_MULTIPROCESSOR = 65536


@pytest.mark.parametrize("warpgroups", [1, 2, 3, 4])
def test_no_thread_waits_for_registers_that_are_not_there(warpgroups):
    threads = 128 * (warpgroups + 1)
    given = REGISTERS_OF_A_MULTIPROCESSOR // threads // 8 * 8  # by the launch, to each thread
    taken = warpgroups * mosaic.registers(warpgroups) + mosaic.COPYING_REGISTERS
    assert taken <= given * (warpgroups + 1)
    assert mosaic.registers(warpgroups) % 8 == 0, "as `setmaxnreg` takes them"
    assert mosaic.registers(warpgroups) <= 256, "likewise"


def test_tiles_are_swizzled_by_whole_rows():
    for columns, dtype in ((64, jnp.bfloat16), (32, jnp.uint16), (64, jnp.float32)):
        tile = mosaic.shared((2, 16, columns), dtype)
        assert tile.shape == (2, 16, columns)
        with pytest.raises(AssertionError):
            np.testing.assert_equal(tile, mosaic.shared_rows((2, 16, columns), dtype))


def decode_kernel(words_ref, out_ref, *, tiles, full):
    """Copies words [64, 64] in, doubles them in PTX, and writes them transposed."""

    @pl.when(jax.lax.axis_index("warpgroup") == 1)
    def _copy():
        mosaic.give_registers()
        mosaic.copy_in(words_ref, tiles, full)

    @pl.when(jax.lax.axis_index("warpgroup") == 0)
    def _compute():
        mosaic.take_registers(1)
        mosaic.wait(full)
        words = mosaic.load(tiles, interpret=False)
        with backend.decoding_with(mosaic.Registers(64)):
            doubled = backend.inline_ptx(
                "add.rn.bf16x2 $0, $1, $2;", words, words, dtype=jnp.bfloat16
            )
        mosaic.store_transposed(tiles, doubled, interpret=False)
        mosaic.copy_out(tiles, out_ref)
        mosaic.wait_for_stores()


def double_transposed(words: jax.Array) -> jax.Array:
    return mosaic.launch(
        decode_kernel,
        words,
        out_shape=jax.ShapeDtypeStruct((64, 64), jnp.bfloat16),
        grid={"one": 1},
        warpgroups=1,
        scratch={"tiles": mosaic.shared((64, 64), jnp.bfloat16), "full": mosaic.Barrier()},
        name="double_transposed",
        interpret=False,
    )


def test_ptx_is_applied_to_pairs_in_registers(lower_for_cuda):
    text = lower_for_cuda(double_transposed, jax.ShapeDtypeStruct((64, 64), jnp.bfloat16))
    assert "mosaic_gpu" in text


@pytest.mark.gpu
def test_ptx_is_applied_to_pairs_in_registers_on_the_gpu(rng):
    if int(backend.compute_capability() or 0) != 9:
        pytest.skip("needs compute capability 9.0")
    words = jnp.asarray(rng.normal(size=(64, 64)), jnp.bfloat16)
    doubled = jax.jit(double_transposed)(words)
    np.testing.assert_array_equal(np.asarray(doubled), np.asarray(words.T + words.T))
