from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import pytest

from mpjax.kernels import ptx
from mpjax.kernels.launch import Settings, first_program_id, launch, load, store
from mpjax.kernels.target import current_target

LANES, PAIRS = 32, 256


def look_up(halves: jax.Array) -> jax.Array:
    """Each lane's own copy of every pair [pairs, lanes], of a table's halves uint32 [8]."""

    def kernel(halves_ref, out_ref):
        target, one = current_target(), first_program_id() + jnp.zeros((1, 1), jnp.int32)
        address = target.share_pairs([load(halves_ref.at[one + i]) for i in range(8)])
        lane = jnp.arange(LANES)[None, :]
        for pair in range(PAIRS):
            place = jnp.broadcast_to(address, (1, LANES)) + 128 * pair + 4 * lane
            word = target.inline_ptx("ld.shared.b32 $0, [$1];", place, dtype=jnp.uint32)
            store(out_ref.at[one + pair, lane], word)

    return launch(
        kernel,
        halves,
        out_shape=jax.ShapeDtypeStruct((PAIRS, LANES), jnp.uint32),
        grid=(1,),
        settings=Settings("look_up"),
        interpret=False,
    )


def test_pairs_are_shared_in_kernels(lower_for_cuda):
    program = lower_for_cuda(look_up, jax.ShapeDtypeStruct((8,), jnp.uint32))
    assert program.count(".shared .align 1024 .b8 pairs") == 1


@pytest.mark.parametrize("halves", [4, 8])
def test_shared_memory_has_room_for_what_is_stored(halves):
    assembly = ptx.share_pairs(halves)
    declared = [int(size) for size in re.findall(r"\.b8 \w+\[(\d+)\]", assembly)]
    assert sum(declared) == ptx.PAIR_BYTES
    assert declared[0] == 4 * PAIRS * LANES
    stored = re.findall(r"st\.shared\.b32 \[table\+(\d+)\], \$(\d+);", assembly)
    assert [(int(at), int(n)) for at, n in stored] == [(4 * i, i + 1) for i in range(halves)]
    # There are as many copies as lanes; four begin together at every sixteenth byte.
    places = [int(at) for at in re.findall(r"add\.u32 place, lane, (\d+);", assembly)]
    assert places == list(range(0, 4 * LANES, 16))
