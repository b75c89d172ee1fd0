"""Encodes and stores keys and values, inside the kernels that write to the cache."""

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


def shapes_of(pages: KVPages) -> KVPages:
    """The shapes of pages, for a kernel's outputs that reuse the pages' buffers."""
    return jax.tree.map(lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype), pages)


# Programs of one warp are started one after another; about this many start while one runs.
PROGRAMS_STARTED_PER_TASK = 2000
PROGRAMS_PER_MULTIPROCESSOR = 32  # the most at a time, on compute capability 9.0


def programs_for(tasks: int, heads: int) -> int:
    """The best number of one-warp programs that share the tasks of a head.

    The time to start n programs grows with n, and the time of their work with tasks / n. The sum is
    smallest if n is proportional to the square root of the tasks.
    """
    programs = math.isqrt(tasks * heads * PROGRAMS_STARTED_PER_TASK)
    programs = min(programs, device.multiprocessors() * PROGRAMS_PER_MULTIPROCESSOR)
    rounds = pl.cdiv(tasks, max(1, programs // heads))
    return pl.cdiv(tasks, rounds)


def for_each(
    program: jax.Array, tasks: int | jax.Array, visit: Callable[[jax.Array], None]
) -> None:
    """Calls `visit` with the index of each of a program's tasks in turn, inside a kernel.

    program: its index along the grid's first axis. Task i belongs to program i modulo the number of
        programs along that axis.
    """
    programs = pl.num_programs(0)
    if isinstance(tasks, int) and tasks == programs:
        visit(program)
        return
    mine = pl.cdiv(jnp.maximum(tasks - program, 0), programs)
    jax.lax.fori_loop(0, mine, lambda index, _: visit(program + index * programs), None)


class Slot(NamedTuple):
    """The position of a token in the pages, or of the first of several tokens on one page."""

    page: jax.Array
    position: jax.Array  # in the page
    valid: jax.Array  # whether the token is stored at all


class Channels(NamedTuple):
    """A range of neighbouring channels, the same in each of the equal slices of a head."""

    first: Any  # jax.Array or int, counted from the start of the slice
    width: int


def find_slot(span: Span, page_size: int, batch: jax.Array, token: jax.Array) -> Slot:
    """The slot of new token `token` of sequence `batch`, inside a kernel.

    span: of references. The slot is invalid for tokens beyond the sequence's count or its block
        table, or at negative positions.
    """
    position = load(span.starts.at[batch]) + token
    entry = position // page_size
    entries = span.block_tables.shape[1]
    valid = (token < load(span.counts.at[batch])) & (entry < entries) & (position >= 0)
    page = load(span.block_tables.at[batch, jnp.clip(entry, 0, entries - 1)])
    return Slot(page, position % page_size, valid)


def lanes(width: int) -> jax.Array:
    """The channel of each lane of a tile with `width` channels: [next power of two].

    If the width is a power of two, lane i has channel i. Otherwise channels are divided into runs
    of neighbours as long as the odd factor of the width, and each run is padded to a power of two
    with copies of its last channel. Copies change neither minimum nor maximum, and the runs are a
    power of two of lanes apart, as the Hadamard transform requires.
    """
    lane = jnp.arange(pl.next_power_of_2(width))
    # Returned without the formula below: through its minimum the compiler would not see that lanes
    # are contiguous, and would load them one by one.
    if len(lane) == width:
        return lane
    run, filled = _run(width)
    return lane // filled * run + jnp.minimum(lane % filled, run - 1)


def targets(width: int) -> tuple[jax.Array, jax.Array]:
    """The channel to which each lane is stored, and whether it is stored, both [next power of two].

    Copies that pad a run are not stored. They have distinct indices beyond `width`, because lanes
    with one index would have to be stored alike.
    """
    lane = jnp.arange(pl.next_power_of_2(width))
    if len(lane) == width:
        return lane, lane < width
    run, filled = _run(width)
    place = lane % filled
    beyond = width + lane // filled * (filled - run) + place - run
    is_first = place < run
    return jnp.where(is_first, lane // filled * run + place, beyond), is_first


def _run(width: int) -> tuple[int, int]:
    """The length of a run of neighbouring channels, and its length with padding."""
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
    """Encodes and stores a key or value of a head, of one or several tokens, inside a kernel.

    pieces: equal slices of the head's channels, as many as the codes have planes, or a multiple.
        Each is [lanes] for one token, or [tokens, lanes] for several on one page, with channels in
        the order of `lanes`.
    dtype: of the key or value.
    channels: if channels have scales, the channels of each slice that are in its piece; None for
        all channels.
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
        for i, pairs in enumerate(parameters):
            lane, is_first = (x[None, :] for x in targets(width))
            target = side.parameters.at[slot.page, head, group, i * stride + first + lane]
            mask = jnp.broadcast_to(slot.valid & is_first, target.shape)
            store(target, pairs, mask=mask)
