"""The producer warpgroup of a program: it begins the copies of all operands to shared memory."""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
from jax.experimental import pallas as pl

from mpjax.kernels.gemm.warpgroups.program import Program
from mpjax.kernels.mosaic import memory


class _Block(NamedTuple):
    """A block of K of a share of a program.

    number: among the share's blocks. block: its index in x. slot: in shared memory, of its words.
    """

    number: jax.Array
    share: int
    block: jax.Array
    slot: jax.Array


def produce(program: Program) -> None:
    """Copies all blocks of a program to shared memory, each as soon as a slot for it is free."""
    shares = program.call.config.shares

    def copy_round(number: jax.Array, _: None) -> None:
        """Copies the block `number` of each share."""
        _copy(program, number, 0)  # no share has more blocks than the first
        for share in range(1, shares):
            exists = program.first + number * shares + share < program.last
            pl.when(exists)(functools.partial(_copy, program, number, share))

    rounds = pl.cdiv(program.last - program.first, shares)
    jax.lax.fori_loop(0, rounds, copy_round, None)


def _copy(program: Program, number: jax.Array, share: int) -> None:
    """Copies the words, parameters, x and scales of x of a share's block."""
    staged = program.call.stages
    block = program.first + number * program.call.config.shares + share
    slot = program.slot(share, number, staged.blocks)
    pl.when(number >= staged.blocks)(lambda: memory.wait(program.shared.free.at[slot]))
    for half in range(program.call.halves):
        _copy_half(program, block, slot, half)
    _copy_x(program, _Block(number, share, block, slot))


def _copy_x(program: Program, block: _Block) -> None:
    """Copies x of a block, and its scales.

    x is copied at once to the slot of the words, or plane by plane to slots of its own.
    """
    call, arguments, shared = program.call, program.arguments, program.shared
    format, config, staged = call.format, call.config, call.stages
    place, arrival = block.slot, shared.full.at[block.slot]
    if call.scales_x_blocks:
        rows = pl.ds(program.first_row, config.tile_m)
        scales = arguments.x_block_scales.at[pl.ds(block.block, 1), rows]
        memory.copy_in(scales, shared.x_scale_tiles.at[place], arrival)
    for part in range(staged.parts):
        if staged.parts > 1:
            step = block.number * staged.parts + part
            place = program.slot(block.share, step, staged.x)
            is_used = step >= staged.x
            pl.when(is_used)(functools.partial(memory.wait, shared.x_free.at[place]))
            arrival = shared.x_full.at[place]
        size = format.block // staged.parts
        channels = pl.ds((block.block * staged.parts + part) * size, size)
        x = arguments.x.at[pl.ds(program.first_row, config.tile_m), channels]
        memory.copy_in(x, shared.x_tiles.at[place], arrival)


def _copy_half(program: Program, block: jax.Array, slot: jax.Array, half: int) -> None:
    """Copies the words and parameters of a block of K, of a half of the tile's output channels."""
    call, arguments, shared = program.call, program.arguments, program.shared
    format, arrival = call.format, shared.full.at[slot]
    outputs = pl.ds(program.outputs_of(half), call.config.tile_n // call.halves)
    place, number = program.place_of(slot, half), program.block_of_weight(block)
    width = format.plane_width
    if call.is_plain:
        words = arguments.words.at[program.matrix, pl.ds(block * width, width), outputs]
    elif format.is_flat:
        words = arguments.words.at[program.matrix, outputs, pl.ds(block * width, width)]
    else:
        words = arguments.words.at[number, outputs, :]
    memory.copy_in(words, shared.word_tiles.at[place], arrival)
    if call.has_groups:
        count = format.parameters_of_block
        parameters = arguments.parameters.at[pl.ds(number * count, count), outputs]
        memory.copy_in(parameters, shared.parameter_tiles.at[place], arrival)
