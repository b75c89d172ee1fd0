"""What a warpgroup does that computes: it decodes planes of codes, and multiplies them with x.

A plane, or of few rows several beside each other, is decoded while what comes before is multiplied.
Sums are of 64 output channels, and of the blocks of K that come in this warpgroup's share.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from mpjax.kernels import codes as code_kinds
from mpjax.kernels.gemm.warpgroups.program import Program
from mpjax.kernels.mosaic import WARPGROUP_OUTPUTS, memory, products
from mpjax.kernels.target import current_target


class Block(NamedTuple):
    """What a warpgroup has of a block of K in its registers."""

    slot: jax.Array
    words: list[jax.Array]  # tiles [64, plane width]
    parameters: list[jax.Array]  # a row [64] for each group


class Consumer:
    """The sums of one warpgroup.

    column: of 64 outputs, which of the program's it has.
    share: of K, which of the column's it has.
    """

    def __init__(self, program: Program, column: Any, share: Any) -> None:
        call, arguments, shared = program.call, program.arguments, program.shared
        self.program, self.call, self.share = program, call, share
        self.outputs = pl.ds(column * WARPGROUP_OUTPUTS, WARPGROUP_OUTPUTS)  # of the program's
        self.scratch = None
        if shared.interpreted_sums is not None:
            self.scratch = shared.interpreted_sums.at[program.warpgroup]
        self.count = pl.cdiv(program.last - program.first - share, call.config.shares)
        # What sticks out reads what it does not need.
        output = program.first_output + column * WARPGROUP_OUTPUTS
        output = jnp.minimum(output, arguments.words.shape[1] - WARPGROUP_OUTPUTS)
        of_channels = arguments.channel_scales
        if not call.has_groups:
            of_channels = arguments.parameters.at[0]
        self.channel_row = None
        if of_channels is not None:
            of_outputs = of_channels.at[pl.ds(output, WARPGROUP_OUTPUTS)]
            self.channel_row = memory.load_row(of_outputs)
        width = call.format.plane_width
        self.of_table = call.kind.shared(arguments.table, call.operand, width)

    def run(self) -> list[jax.Array]:
        """Sums [64, rows], of one product after the other."""
        call, exponent = self.call, 0
        config = call.config
        accumulate = functools.partial(products.accumulate, dtype=call.sum_dtype)
        if config.has_few_rows and not call.format.is_flat:
            sums = [self._of_few_rows()]
        elif call.stages.parts == 1:
            sums = accumulate(config.products, self._of_blocks, self.scratch)
        else:
            sums = accumulate((config.tile_m,), self._of_planes, self.scratch)
            if call.scales_groups:
                exponent = call.kind.scaled_exponent(call.operand)
        return [part * 2.0**-exponent for part in sums] if exponent else sums

    def scaled(self, sums: jax.Array, row: jax.Array) -> jax.Array:
        """Sums times the scales that a row of parameters, or of channels, says."""
        call, rows = self.call, sums.shape[1]
        if call.kind.has_channel_scales:
            return sums * current_target().column(row, rows)
        scale = call.kind.load(row, call.scale_dtype, call.operand, rows).scale
        assert scale is not None
        return sums * scale

    def _of_few_rows(self) -> jax.Array:
        call, config = self.call, self.call.config
        mma_sync = config.multiplies_now(looks_up=call.kind.has_table)
        in_turn = not mma_sync and config.multiplies_in_turn(call.format.bits)
        add_products: Any = functools.partial(products.add_products, mma_sync=mma_sync, scratch=self.scratch)
        if in_turn and not current_target().is_interpreted:
            add_products = products.add_products_overlapped

        def go_on(number: jax.Array, sums: jax.Array) -> jax.Array:
            block = self._load(number)

            def add(sums: jax.Array, term: jax.Array, group: int) -> jax.Array:
                if call.scales_groups:
                    term = self.scaled(term, block.parameters[group])
                return sums + term

            sums = add_products(sums, self._products(block), add)
            memory.arrive(self.program.shared.free.at[block.slot])
            return sums

        shape = WARPGROUP_OUTPUTS, config.tile_m
        nothing = memory.zeros(shape, call.sum_dtype)
        return jax.lax.fori_loop(0, self.count, go_on, nothing)

    def _products(self, block: Block) -> list[products.Product]:
        """Those of few rows: planes beside each other; of one group, if that has a scale."""
        call, width = self.call, self.call.operand_width
        planes = self._decoders(block, scaled=False)
        joined = width // call.format.plane_width

        def operand(first: int) -> jax.Array:
            tiles = [decode() for decode in planes[first : first + joined]]
            return products.join(tiles)

        operands = [functools.partial(operand, first) for first in range(0, len(planes), joined)]
        tiles = [
            self.program.shared.x_tiles.at[block.slot, :, pl.ds(first, width)]
            for first in range(0, call.format.block, width)
        ]
        size = len(operands) // (len(block.parameters) if call.scales_groups else 1)
        return [
            products.Product(operands[first : first + size], tiles[first : first + size])
            for first in range(0, len(operands), size)
        ]

    def _of_planes(self, sums: Any) -> list[jax.Array]:
        call, shared = self.call, self.program.shared

        def go_on(number: jax.Array, _: None) -> None:
            block = self._load(number)
            memory.arrive(shared.free.at[block.slot])
            for plane, decode in enumerate(self._decoders(block, scaled=call.scales_groups)):
                step = number * call.format.planes + plane
                place = self.program.slot(self.share, step, call.stages.x)
                weights = decode()
                memory.wait(shared.x_full.at[place])
                products.multiply(sums, weights, shared.x_tiles.at[place])
                self._free_before(step, shared.x_free, call.stages.x)

        jax.lax.fori_loop(0, self.count, go_on, None)
        products.wait_for_products(0)
        return [sums[...]]

    def _of_blocks(self, *sums: Any) -> list[jax.Array]:
        call, shared = self.call, self.program.shared
        width = call.format.plane_width

        def go_on(number: jax.Array, _: None) -> None:
            if call.format.is_flat:
                place = self.program.slot(self.share, number, call.stages.blocks)
                memory.wait(shared.full.at[place])
                operands = [lambda: shared.word_tiles.at[place, self.outputs, :]]
            else:
                block = self._load(number)
                place, operands = block.slot, self._decoders(block, scaled=False)
            for plane, decode in enumerate(operands):
                weights, row = decode(), 0
                for part in sums:
                    x_rows, channels = pl.ds(row, part.shape[1]), pl.ds(plane * width, width)
                    x = shared.x_tiles.at[place, x_rows, channels]
                    products.multiply(part, weights, x)
                    row += part.shape[1]
                if plane == 0:
                    self._free_before(number, shared.free, call.stages.blocks, len(sums))
                else:
                    products.wait_for_products(len(sums))

        jax.lax.fori_loop(0, self.count, go_on, None)
        products.wait_for_products(0)
        return [part[...] for part in sums]

    def _free_before(self, step: jax.Array, barriers: Any, slots: int, at_work: int = 1) -> None:
        # Those of the step before are done when no more than this one's are at work.
        products.wait_for_products(at_work)
        before = self.program.slot(self.share, step + slots - 1, slots)
        pl.when(step > 0)(lambda: memory.arrive(barriers.at[before]))

    def _load(self, number: jax.Array) -> Block:
        """The share's block of a number, when it is there."""
        call, shared = self.call, self.program.shared
        format, width = call.format, call.format.plane_width
        place = self.program.slot(self.share, number, call.stages.blocks)
        memory.wait(shared.full.at[place])
        words = [
            memory.load(
                shared.word_tiles.at[place, self.outputs, pl.ds(first, width)],
            )
            for first in range(0, format.columns * width, width)
        ]
        if not call.has_groups:
            assert self.channel_row is not None
            return Block(place, words, [self.channel_row])
        rows = [
            memory.load_row(shared.parameter_tiles.at[place, word, self.outputs])
            for word in range(format.parameters_of_block)
        ]
        return Block(place, words, rows)

    def _decoders(self, block: Block, *, scaled: bool) -> list[Callable[[], jax.Array]]:
        """What decodes each plane."""
        call, kind, operand = self.call, self.call.kind, self.call.operand
        planes, groups = call.format.planes, len(block.parameters)

        def of_group(row: jax.Array) -> code_kinds.Decoder:
            group = kind.load(row, call.scale_dtype, operand, call.format.plane_width)
            if scaled:
                return kind.scaled_decoder(block.words, group, self.of_table, operand)
            return kind.decoder(block.words, group.arguments, self.of_table, operand)

        decode = [of_group(row) for row in block.parameters]
        return [
            functools.partial(decode[plane * groups // planes], plane) for plane in range(planes)
        ]
