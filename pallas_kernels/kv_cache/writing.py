"""How keys and values are encoded and stored, inside of the kernels that write to the cache."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from mpjax.kernels import device
from mpjax.kernels.batch import Span
from mpjax.kernels.kv_cache import hadamard
from mpjax.kernels.kv_cache.cache import KVPages, Side
from mpjax.kernels.launch import load, store


def like(pages: KVPages) -> KVPages:
    """The shapes of the pages, for a kernel that takes over their buffers."""
    return jax.tree.map(lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype), pages)


# Programs of one warp are started one by one, so many of them in about the time that one takes; and
# a multiprocessor of compute capability 9.0 runs so many at once.
STARTED_MEANWHILE, AT_ONCE = 2000, 32


def programs_for(tasks: int, heads: int) -> int:
    """How many programs of one warp should share so many tasks, for each of the heads.

    With n programs, starting them takes time like n, and what they do like tasks / n.
    """
    programs = math.isqrt(tasks * heads * STARTED_MEANWHILE)
    programs = min(programs, device.multiprocessors() * AT_ONCE)
    rounds = pl.cdiv(tasks, max(1, programs // heads))
    return pl.cdiv(tasks, rounds)


def for_each(
    program: jax.Array, tasks: int | jax.Array, visit: Callable[[jax.Array], None]
) -> None:
    """Calls `visit` with the numbers of a program's tasks, one after another, in a kernel.

    program: its index along the grid's first axis, along which tasks are dealt out.
    """
    programs = pl.num_programs(0)
    if isinstance(tasks, int) and tasks == programs:
        visit(program)
        return
    mine = pl.cdiv(jnp.maximum(tasks - program, 0), programs)
    jax.lax.fori_loop(0, mine, lambda index, _: visit(program + index * programs), None)


class Slot(NamedTuple):
    """Where a token goes in the pages, or the first of several, and whether any goes there."""

    page: jax.Array
    position: jax.Array
    valid: jax.Array


class Channels(NamedTuple):
    """Neighbours in each of the equal slices of a head."""

    first: Any  # counted from the slice's own first; jax.Array or int
    width: int


def find_slot(span: Span, page_size: int, batch: jax.Array, token: jax.Array) -> Slot:
    """The slot of a new token, in a kernel, where `span` has references."""
    position = load(span.starts.at[batch]) + token
    entry = position // page_size
    entries = span.block_tables.shape[1]
    valid = (token < load(span.counts.at[batch])) & (entry < entries) & (position >= 0)
    page = load(span.block_tables.at[batch, jnp.clip(entry, 0, entries - 1)])
    return Slot(page, position % page_size, valid)


def lanes(width: int) -> jax.Array:
    """Which of `width` channels each lane of a tile holds: 0 … width − 1 where that fills it.

    Else each run of neighbours as long as the odd factor of the width is filled up with its last,
    which changes no extremum, and leaves runs a power of two of lanes apart.
    """
    lane = jnp.arange(pl.next_power_of_2(width))
    # Of a minimum the compiler doesn't see that lanes are neighbours, and loads them one by one.
    if len(lane) == width:
        return lane
    run, filled = _run(width)
    return lane // filled * run + jnp.minimum(lane % filled, run - 1)


def targets(width: int) -> tuple[jax.Array, jax.Array]:
    """Where lanes are stored, and which are: two may not meet where that differs."""
    lane = jnp.arange(pl.next_power_of_2(width))
    if len(lane) == width:
        return lane, lane < width
    run, filled = _run(width)
    place = lane % filled
    beyond = width + lane // filled * (filled - run) + place - run
    is_first = place < run
    return jnp.where(is_first, lane // filled * run + place, beyond), is_first


def _run(width: int) -> tuple[int, int]:
    run = width // hadamard.order(width)
    return run, pl.next_power_of_2(run)


def write(
    side: Side,
    pieces: Sequence[jax.Array],
    dtype: jnp.dtype,
    slot: Slot,
    head: jax.Array,
    channels: Channels | None = None,
) -> None:
    """Encodes a head's key or value, or several on one page, and stores them, in a kernel.

    pieces: equal slices of its channels, as many as the codes have planes, or a multiple; each at
        its `lanes`. Of several tokens [tokens, lanes].
    dtype: of the vector.
    channels: which of each slice these are; all, unless channels have scales.
    """
    scales = None
    if side.codes.scaling == "head":
        scales = [load(side.parameters.at[head + jnp.arange(1)])] * len(pieces)
    elif side.codes.scaling == "static":
        width = side.parameters.shape[1] // len(pieces)
        channel = lanes(width)
        scales = [load(side.parameters.at[head, i * width + channel]) for i in range(len(pieces))]
    if side.codes.hadamard:
        dim = side.words.shape[3] * side.codes.planes
        pieces = hadamard.transform_pieces(pieces, dim, dtype)
    slices, parameters = side.codes.encode(pieces, scales, side.parameter_dtype)
    *tokens, _ = pieces[0].shape
    position = slot.position
    if tokens:
        position += jnp.arange(tokens[0])[:, None]
    stride = side.words.shape[3] // len(slices)
    first, width = Channels(0, stride) if channels is None else channels
    for i, words in enumerate(slices):
        lane, is_first = (jnp.expand_dims(x, tuple(range(len(tokens)))) for x in targets(width))
        target = side.words.at[slot.page, head, position, i * stride + first + lane]
        mask = jnp.broadcast_to(slot.valid & is_first, target.shape)
        store(target, words.astype(side.words.dtype), mask=mask)
    if side.codes.scaling == "token":
        target = side.parameters.at[
            slot.page, head, position if tokens else position + jnp.arange(1)
        ]
        store(target, parameters[0], mask=jnp.broadcast_to(slot.valid, target.shape))
    elif side.codes.group is not None:
        group = slot.position // side.codes.group
        stride = side.parameters.shape[3] // len(parameters)
        for i, found in enumerate(parameters):
            lane, is_first = (x[None, :] for x in targets(width))
            target = side.parameters.at[slot.page, head, group, i * stride + first + lane]
            mask = jnp.broadcast_to(slot.valid & is_first, target.shape)
            store(target, found, mask=mask)
