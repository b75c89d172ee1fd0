"""A sum over devices by one kernel on each: it writes to the others' inboxes, and polls its own.

A thread writes its words of x into the inboxes of all devices, each word with the number of the
round, waits until the words of all devices in its own inbox have this number, and adds them. This
is the protocol LL of NCCL: a word and its flag arrive together, so no fence and no second message
is needed, at the cost of twice the bytes.

The number of the round is in the inbox, and rises with each sum. Rounds write to two halves of the
inbox in turn, which is enough: a device writes in round r + 2 only after its kernel of round r + 1
has got the parts of all others, which they sent after their kernels of round r had ended, and those
had read the half.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from mpjax.kernels.mosaic.inline_ptx import run_ptx
from mpjax.kernels.sums import ptx
from mpjax.kernels.sums.layout import HEADER, Tiles


def open_inbox(axis: str, devices: int, words: int) -> Any:
    """A reference to an empty inbox, int32 [words], that has the addresses of all devices'.

    No device gets the addresses before all have zeroed their inboxes.
    """
    inbox = jax.new_ref(jnp.zeros(words, jnp.int32))
    one = {"programs": 1, "warpgroups": 1}
    two = jax.ShapeDtypeStruct((2,), jnp.int32)
    own = run_ptx(ptx.ADDRESS, inbox, out_shape=two, name="address_of_inbox", **one)
    found = jax.lax.all_gather(own, axis)
    number = jax.lax.axis_index(axis).astype(jnp.int32)[None]
    run_ptx(
        ptx.write_addresses(devices),
        *(found, number, inbox),
        out_shape=two,
        name="write_addresses",
        **one,
    )
    return inbox


@functools.partial(jax.jit, static_argnums=(2, 3))  # lowers and compiles equal sums once
def add(terms: jax.Array, inbox: Any, devices: int, most_bytes: int) -> jax.Array:
    """The sum of all devices' terms [terms, size], float32 or bfloat16: [size].

    `size` is of a multiple of 16 bytes. Terms of a device are added first, and the sum is rounded.
    inbox: from `open_inbox`. most_bytes: of a sum, for which the inbox was opened.
    """
    count, size = terms.shape
    tiles = Tiles(devices, size * terms.dtype.itemsize, count)
    part = Tiles(devices, most_bytes).part_bytes
    return run_ptx(
        ptx.push_and_add(tiles, terms.dtype, HEADER, part),
        *(terms, inbox),
        out_shape=jax.ShapeDtypeStruct((size,), terms.dtype),
        programs=tiles.programs,
        warpgroups=tiles.warpgroups,
        name="sum_over_devices",
    )
