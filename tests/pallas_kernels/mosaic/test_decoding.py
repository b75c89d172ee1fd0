from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl

from mpjax.kernels.codes.look_up import InBoth, InSharedRows, LookUp
from mpjax.kernels.mosaic import decoding, memory
from mpjax.kernels.mosaic.launch import Grid, give_registers, launch, take_registers
from mpjax.kernels.target import tracing_for

WARPGROUPS, WIDTH, PLANES = 2, 64, 4


def look_up_kernel(
    words_ref, table_ref, out_ref, *, word_tiles, out_tiles, full, rows, filled, way, bits, dtype
):
    """Looks up words [channels, WIDTH], whose nibbles are codes, in a table."""
    warpgroup = jax.lax.axis_index("warpgroup")
    own = pl.ds(warpgroup * 64, 64)

    @pl.when(warpgroup == WARPGROUPS)
    def _copy():
        give_registers()
        memory.copy_in(words_ref, word_tiles, full)

    @pl.when(warpgroup < WARPGROUPS)
    def _compute():
        take_registers(WARPGROUPS)
        pairs = decoding.Pairs(rows, filled, WARPGROUPS)
        with tracing_for(decoding.Warpgroups(pairs)):
            prepared = way.prepare(table_ref, bits, dtype, WIDTH)
            memory.wait(full)
            words = memory.load(word_tiles.at[own, :])
            decode = way.decoder(lambda quad: words, prepared, dtype)
            for plane in range(PLANES):
                tile = out_tiles.at[warpgroup]
                memory.wait_for_stores()
                memory.store_transposed(tile, decode(plane))
                memory.copy_out(tile, out_ref.at[plane, :, own])
            memory.wait_for_stores()


def look_up(
    words: jax.Array, table: jax.Array, *, way: LookUp, bits: int, dtype: jnp.dtype
) -> jax.Array:
    """Values [PLANES, WIDTH, channels]."""
    channels = 64 * WARPGROUPS
    return launch(
        functools.partial(look_up_kernel, way=way, bits=bits, dtype=dtype),
        words,
        table,
        out_shape=jax.ShapeDtypeStruct((PLANES, WIDTH, channels), dtype),
        grid=Grid({"one": 1}, WARPGROUPS),
        scratch={
            "word_tiles": memory.shared((channels, WIDTH), words.dtype),
            "out_tiles": memory.shared((WARPGROUPS, WIDTH, 64), dtype),
            "full": memory.Barrier(),
            "rows": decoding.shared_rows_of_pairs(bits),
            "filled": memory.Barrier(num_arrivals=WARPGROUPS),
        },
        name="look_up",
        interpret=False,
    )


each_table = pytest.mark.parametrize(
    ("way", "bits", "dtype"),
    [
        *((InSharedRows(), 2, "bfloat16"), (InSharedRows(), 3, "float16")),
        *((InSharedRows(), 4, "bfloat16"), (InSharedRows(), 4, "float16")),
        *((InBoth(), 2, "float16"), (InBoth(), 3, "bfloat16"), (InBoth(), 3, "float16")),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, LookUp) else str(value),
)


@each_table
def test_look_ups_lower(way, bits, dtype, lower_for_cuda):
    run = functools.partial(look_up, way=way, bits=bits, dtype=jnp.dtype(dtype))
    words = jax.ShapeDtypeStruct((64 * WARPGROUPS, WIDTH), jnp.uint16)
    assert "mosaic_gpu" in lower_for_cuda(run, words, jax.ShapeDtypeStruct((2**bits,), jnp.float32))


@pytest.mark.gpu
@each_table
def test_every_pair_of_codes_is_found_on_the_gpu(way, bits, dtype, rng, wgmma):
    # Neighbouring lanes are a register, whose bytes are pairs: of planes 0, 1, 2 and 3.
    codes = rng.integers(2**bits, size=(64 * WARPGROUPS, WIDTH // 2, PLANES, 2))
    pairs = 2**bits * codes[..., 0] + codes[..., 1]
    assert np.unique(pairs).size == 4**bits, "a pair is missing"
    nibbles = codes.reshape(*codes.shape[:2], 2, 4)
    words = (nibbles << np.arange(0, 16, 4)).sum(-1).reshape(-1, WIDTH).astype(np.uint16)
    table = jnp.asarray(rng.standard_normal(2**bits), jnp.float32)
    run = jax.jit(functools.partial(look_up, way=way, bits=bits, dtype=jnp.dtype(dtype)))
    found = run(jnp.asarray(words), table)
    lanes = codes.swapaxes(2, 3).reshape(64 * WARPGROUPS, WIDTH, PLANES)
    expected = np.asarray(table.astype(dtype))[lanes.T]
    np.testing.assert_array_equal(np.asarray(found), expected)
