"""The producer warpgroup of a program: it begins the copies of all operands to shared memory."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from mpjax.kernels.gemm.warpgroups.program import Program
from mpjax.kernels.mosaic import memory
from mpjax.kernels.mosaic.launch import launch_next, wait_for_inputs


class _Block(NamedTuple):
    """A block of K of a share of a program.

    number: among the share's blocks. block: its index in x. slot: in shared memory, of its words.
    """

    number: jax.Array
    share: int
    block: jax.Array
    slot: jax.Array


def produce(program: Program) -> None:
    """Copies all blocks of a program to shared memory, each as soon as a slot for it is free.

    A kernel that is launched early copies the words of its first blocks while the kernel before
    still computes x.
    """
    ahead, shares = program.call.ahead, program.call.config.shares

    def copy_rounds(
        copy: Callable[[Program, _Block], None], start: int, stop: jax.Array | int
    ) -> None:
        """Copies the blocks `start` … `stop` − 1 of all shares."""

        def run(number: jax.Array, _: None) -> None:
            _copy(copy, program, number, 0)  # no share has more blocks than the first
            for share in range(1, shares):
                exists = program.first + number * shares + share < program.last
                pl.when(exists)(functools.partial(_copy, copy, program, number, share))

        jax.lax.fori_loop(start, stop, run, None)

    rounds = pl.cdiv(program.last - program.first, shares)
    if ahead:
        launch_next()
        copy_rounds(_copy_words, 0, jnp.minimum(ahead, rounds))
        wait_for_inputs()
        copy_rounds(_copy_x, 0, jnp.minimum(ahead, rounds))
    copy_rounds(_copy_when_free, ahead, rounds)


def _copy(
    copy: Callable[[Program, _Block], None], program: Program, number: jax.Array, share: int
) -> None:
    call = program.call
    block = program.first + number * call.config.shares + share
    copy(
        program,
        _Block(number, share, block, program.slot(share, number, call.stages.blocks)),
    )


def _copy_when_free(program: Program, block: _Block) -> None:
    """Copies the words, parameters, x and scales of x of a block."""
    is_used = block.number >= program.call.stages.blocks
    pl.when(is_used)(lambda: memory.wait(program.shared.free.at[block.slot]))
    _copy_words(program, block)
    _copy_x(program, block)


def _copy_words(program: Program, block: _Block) -> None:
    """Copies the words and parameters of a block, whose slot is free."""
    for half in range(program.call.halves):
        _copy_half(program, block.block, block.slot, half)


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
