"""A sum over devices in one step: each writes its part into all others' memory, signals, and adds.

A program has a block of the array on each device. It copies the block into the inboxes of all other
devices (ordinary writes by NVLink), tells the same program there that it has done so, waits for as
many signals, and adds the parts in the order of the devices, so that all get the same bits. Nothing
is multicast, and no multiprocessor waits for another program of its own device.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from mpjax.kernels.mosaic import peers
from mpjax.kernels.sums.plans import LEAST_BLOCK, MOST_PROGRAMS


def block_of(size: int) -> int:
    """The numbers of a program, for an array of `size` numbers in float32."""
    block = LEAST_BLOCK
    while block * MOST_PROGRAMS < size:
        block *= 2
    return block


def peer_sum(x: jax.Array, axis: str, devices: int) -> jax.Array:
    """The sum of the x of all devices, float32 of any shape up to MOST_BYTES, on each of them.

    axis: the only axis of the mesh, whose devices are the first of `jax.devices()` in their order.
    devices: their number.
    """
    block = block_of(x.size)
    programs = math.ceil(x.size / block)
    flat = jnp.pad(x.reshape(-1), (0, programs * block - x.size))
    total, _ = peers.launch_on_all(
        functools.partial(_kernel, axis=axis, devices=devices, block=block),
        flat,
        out_shapes=(
            jax.ShapeDtypeStruct(flat.shape, jnp.float32),
            jax.ShapeDtypeStruct((devices, *flat.shape), jnp.float32),
        ),
        programs=programs,
        name="peer_sum",
    )
    return total[: x.size].reshape(x.shape)


def _kernel(
    x_ref: Any,
    total_ref: Any,
    inbox_ref: Any,  # [devices, size], of which each device writes one row in all others' memory
    arrived: Any,
    *,
    axis: str,
    devices: int,
    block: int,
) -> None:
    own, program = jax.lax.axis_index(axis), jax.lax.axis_index("program")
    here = pl.ds(program * block, block)
    others = [jax.lax.rem(own + distance, devices) for distance in range(1, devices)]
    part = x_ref[here]
    for other in others:
        peers.remote(inbox_ref, other)[own, here] = part
    for other in others:
        peers.signal(arrived.at[program], other)
    peers.wait(arrived.at[program], devices - 1)
    total = jnp.zeros_like(part)
    for device in range(devices):
        total += jnp.where(own == device, part, inbox_ref[device, here])
    total_ref[here] = total
