"""The copies of a program's operands to shared memory, and the producer warpgroup.

In a program without a producer, the first consumer begins the copies (`Copies`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from mpjax.kernels.gemm.warpgroups.program import Program
from mpjax.kernels.mosaic import memory


class Block(NamedTuple):
    """A block of K in a program's share.

    number: its index in the share. block: its index in x. slot: of its words in shared memory.
    """

    number: Any
    share: int
    block: jax.Array
    slot: jax.Array

    @classmethod
    def of(cls, program: Program, number: Any, share: int = 0) -> Block:
        """Block `number` of a share."""
        block = program.first + number * program.call.config.shares + share
        return cls(number, share, block, program.slot(share, number, program.call.stages.blocks))


def produce(program: Program) -> None:
    """Copies all blocks of a program to shared memory, each as soon as a slot for it is free."""
    shares = program.call.config.shares

    def copy_round(number: jax.Array, _: None) -> None:
        """Copies block `number` of each share."""
        _copy(program, number, 0)  # no share has more blocks than the first
        for share in range(1, shares):
            exists = program.first + number * shares + share < program.last
            pl.when(exists)(functools.partial(_copy, program, number, share))

    rounds = pl.cdiv(program.last - program.first, shares)
    jax.lax.fori_loop(0, rounds, copy_round, None)


def _copy(program: Program, number: jax.Array, share: int) -> None:
    """Copies the words, parameters, x and scales of x of a share's block."""
    block = Block.of(program, number, share)
    copy_words(program, block)
    for part in range(program.call.stages.parts):
        copy_x(program, block, part)


def copy_words(program: Program, block: Block) -> None:
    """Copies the words and parameters of a block, and the scales of its x, to the block's slot."""
    call, arguments, shared = program.call, program.arguments, program.shared
    is_used = block.number >= call.stages.blocks
    pl.when(is_used)(lambda: memory.wait(shared.free.at[block.slot]))
    for half in range(call.halves):
        _copy_half(program, block.block, block.slot, half)
    if call.scales_x_blocks:
        rows = pl.ds(program.first_row, call.config.tile_m)
        scales = arguments.x_block_scales.at[pl.ds(block.block, 1), rows]
        memory.copy_in(scales, shared.x_scale_tiles.at[block.slot], shared.full.at[block.slot])


def copy_x(program: Program, block: Block, part: Any) -> None:
    """Copies x of a block to the slot of its words, or x of plane `part` to a separate slot."""
    call, shared, staged = program.call, program.shared, program.call.stages
    place, arrival = block.slot, shared.full.at[block.slot]
    if staged.parts > 1:
        step = block.number * staged.parts + part
        place = program.slot(block.share, step, staged.x)
        pl.when(step >= staged.x)(lambda: memory.wait(shared.x_free.at[place]))
        arrival = shared.x_full.at[place]
    size = call.format.block // staged.parts
    channels = pl.ds((block.block * staged.parts + part) * size, size)
    x = program.arguments.x.at[pl.ds(program.first_row, call.config.tile_m), channels]
    memory.copy_in(x, shared.x_tiles.at[place], arrival)


def _copy_half(program: Program, block: jax.Array, slot: jax.Array, half: int) -> None:
    """Copies the words and parameters of a block of K for a half of the tile's output channels."""
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


class Copies:
    """The copies of a program without a producer, which its first consumer begins.

    A slot is refilled while products of the next tile run, when all consumers have released it. In
    programs with a producer, all methods do nothing.

    count: the number of the program's blocks.
    """

    def __init__(self, program: Program, count: jax.Array) -> None:
        self.program, self.staged, self.count = program, program.call.stages, count

    def begin(self) -> None:
        """Fills all slots, before the first product."""
        if self.program.call.has_producer:
            return
        staged, steps = self.staged, self.count * self.staged.parts

        @pl.when(self.program.warpgroup == 0)
        def _fill() -> None:
            blocks = jnp.minimum(staged.blocks, self.count)
            jax.lax.fori_loop(0, blocks, lambda number, _: self._copy_block(number), None)
            if staged.parts > 1:
                tiles = jnp.minimum(staged.x, steps)
                jax.lax.fori_loop(0, tiles, lambda step, _: self._copy_tile(step), None)

    def after_block(self, number: jax.Array) -> None:
        """Refills the slot of block `number` − 1, which all consumers have released."""
        self._fill_again(number, 1, self.staged.blocks, self._copy_block)

    def after_words(self, number: jax.Array) -> None:
        """Refills the slot of the words of block `number`, which all consumers have loaded."""
        self._fill_again(number, 0, self.staged.blocks, self._copy_block)

    def after_tile(self, step: jax.Array) -> None:
        """Refills the slot of step − 1's x tile, which all consumers have released."""
        self._fill_again(step, 1, self.staged.x, self._copy_tile, self.staged.parts)

    def _fill_again(
        self,
        step: jax.Array,
        back: int,
        slots: int,
        copy: Callable[[jax.Array], None],
        parts: int = 1,
    ) -> None:
        """Refills the slot of `back` steps ago with the next block or tile, if there is one.

        parts: the steps of a block.
        """
        if self.program.call.has_producer:
            return
        used = step - back
        exists = (used >= 0) & (used + slots < self.count * parts)
        pl.when((self.program.warpgroup == 0) & exists)(lambda: copy(used + slots))

    def _copy_block(self, number: jax.Array) -> None:
        block = Block.of(self.program, number)
        copy_words(self.program, block)
        if self.staged.parts == 1:
            copy_x(self.program, block, 0)

    def _copy_tile(self, step: jax.Array) -> None:
        number, part = jax.lax.div(step, self.staged.parts), jax.lax.rem(step, self.staged.parts)
        copy_x(self.program, Block.of(self.program, number), part)
