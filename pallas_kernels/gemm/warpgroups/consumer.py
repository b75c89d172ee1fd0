"""The consumer warpgroups of a program: each decodes planes of codes and multiplies them with x.

An operand is a plane, or with few rows several adjacent planes. It is decoded while the previous
operand is multiplied. A consumer has the sums of 64 output channels over its share of the program's
blocks of K.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from mpjax.kernels import codes as code_kinds
from mpjax.kernels.gemm import integer_sums
from mpjax.kernels.gemm.warpgroups.producer import Copies
from mpjax.kernels.gemm.warpgroups.program import Program
from mpjax.kernels.mosaic import WARPGROUP_OUTPUTS, memory, products
from mpjax.kernels.target import current_target


class Block(NamedTuple):
    """A block of K in the registers of a consumer."""

    slot: jax.Array  # of the block's words in shared memory
    words: list[jax.Array]  # tiles [64, plane width]
    parameters: list[jax.Array]  # [64] for each scale of input channels in the block


class Consumer:
    """A consumer warpgroup.

    column: the index of its 64 output channels in the program's tile.
    share: the index of its share of K, among the consumers of this column.
    """

    def __init__(self, program: Program, column: Any, share: Any) -> None:
        call, arguments, shared = program.call, program.arguments, program.shared
        self.program, self.call, self.share = program, call, share
        self.column = column
        # With a gate, the program's tile has two halves, and columns are counted in each of them.
        self.half = program.half_of(column)
        if call.gate is not None:
            column = jax.lax.rem(column, call.columns // 2)
        self.outputs = pl.ds(column * WARPGROUP_OUTPUTS, WARPGROUP_OUTPUTS)
        self.scratch = None
        if shared.interpreted_sums is not None:
            self.scratch = shared.interpreted_sums.at[program.warpgroup]
        self.count = pl.cdiv(program.last - program.first - share, call.config.shares)
        # Columns beyond the matrix load the scales of other channels; their sums are never stored.
        output = program.outputs_of(self.half) + column * WARPGROUP_OUTPUTS
        output = jnp.minimum(output, program.outputs - WARPGROUP_OUTPUTS)
        self.output_range = pl.ds(output, WARPGROUP_OUTPUTS)  # in the matrix
        # Parameters [N] of whole output channels, if there are any.
        of_outputs = arguments.channel_scales
        if not (call.has_groups or call.is_plain):
            of_outputs = arguments.parameters.at[program.matrix]
        self.output_parameters = None
        if of_outputs is not None:
            self.output_parameters = memory.load_row(of_outputs.at[self.output_range])
        # The table, in the form of `kind.decoder`'s argument.
        self.table: tuple[jax.Array, ...] = ()
        if arguments.table is not None:
            width = call.format.plane_width
            self.table = call.kind.shared(arguments.table, call.operand, width)

    def run(self) -> list[jax.Array]:
        """Multiplies its share of K: sums [64, rows], one for each of `config.product_rows`."""
        call, config = self.call, self.call.config
        decodes_scaled = not (call.is_plain or call.kind.has_group_scales)
        accumulate = functools.partial(products.accumulate, dtype=call.sum_dtype)
        if call.scales_x_blocks:
            sums = [self._of_scaled_blocks()]
        elif config.has_few_rows and not call.format.is_flat:
            sums = [self._of_few_rows()]
        elif call.stages.parts == 1:
            sums = accumulate(config.product_rows, self._of_blocks, self.scratch)
        else:
            sums = accumulate((config.tile_m,), self._of_planes, self.scratch)
            decodes_scaled |= call.scales_groups
        exponent = call.kind.scaled_exponent(call.operand) if decodes_scaled else 0
        return [part * 2.0**-exponent for part in sums] if exponent else sums

    def scaled(self, sums: jax.Array, parameters: jax.Array) -> jax.Array:
        """Scales sums [64, rows] by `parameters` [64] of a group or of output channels."""
        call, rows = self.call, sums.shape[1]
        if call.kind.has_channel_scales:
            return sums * current_target().column(parameters, rows)
        scale = call.kind.load(parameters, call.scale_dtype, call.operand, rows).scale
        assert scale is not None
        return sums * scale

    def _of_few_rows(self) -> jax.Array:
        """The main loop for few rows, which returns sums [64, tile_m].

        Each block of K has a product for every group of input channels in it; the products, times
        the groups' scales if there are any, are added to the sums.
        """
        call, config = self.call, self.call.config
        mma_sync = config.uses_mma_sync(has_table=call.kind.has_table)
        overlaps = not mma_sync and config.overlaps_groups(call.format.bits)
        add_products: Any = functools.partial(
            products.add_products, mma_sync=mma_sync, scratch=self.scratch
        )
        if overlaps and not current_target().is_interpreted:
            add_products = products.add_products_overlapped

        def go_on(number: jax.Array, sums: jax.Array) -> jax.Array:
            """Adds the products of block `number` to the sums, and frees the block's slot."""
            block = self._load(number)

            def add(sums: jax.Array, term: jax.Array, group: int) -> jax.Array:
                if call.scales_groups:
                    term = self.scaled(term, block.parameters[group])
                return sums + term

            sums = add_products(sums, self._products(block), add)
            memory.arrive(self.program.shared.free.at[block.slot])
            return sums

        shape = WARPGROUP_OUTPUTS, config.tile_m
        zeros = memory.zeros(shape, call.sum_dtype)
        return jax.lax.fori_loop(0, self.count, go_on, zeros)

    def _products(self, block: Block) -> list[products.Product]:
        """The products of a block with few rows: one for each group with a scale, else only one.

        An operand has the input channels of adjacent planes, `call.operand_width` in total.
        """
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
        """The main loop for many rows of 16 bits, whose tiles of x are copied plane by plane."""
        call, shared = self.call, self.program.shared
        copies = Copies(self.program, self.count)

        def go_on(number: jax.Array, _: None) -> None:
            """Multiplies the planes of block `number`, each with its own tile of x."""
            block = self._load(number)  # to registers, which frees its slot immediately
            memory.arrive(shared.free.at[block.slot])
            for plane, decode in enumerate(self._decoders(block, scaled=call.scales_groups)):
                step = number * call.format.planes + plane
                place = self.program.slot(self.share, step, call.stages.x)
                weights = decode()
                memory.wait(shared.x_full.at[place])
                products.multiply(sums, weights, shared.x_tiles.at[place])
                self._free_before(step, shared.x_free, call.stages.x)
                copies.after_tile(step)
                if plane == 0:
                    copies.after_words(number)

        copies.begin()
        jax.lax.fori_loop(0, self.count, go_on, None)
        products.wait_for_products(0)
        return [sums[...]]

    def _of_blocks(self, *sums: Any) -> list[jax.Array]:
        """The main loop if a block's tile of x is copied at once: for 8 bits, and plain weights.

        sums: one for each of `config.product_rows`.
        """
        call, shared = self.call, self.program.shared
        width, copies = call.format.plane_width, Copies(self.program, self.count)

        def go_on(number: jax.Array, _: None) -> None:
            """Multiplies the planes of block `number` with columns of its tile of x.

            Products run while the next plane is decoded. So the previous block's products end while
            the first plane of this block is decoded, and only then its slot is freed.
            """
            if call.format.is_flat:  # words are operands in shared memory
                place = self.program.slot(self.share, number, call.stages.blocks)
                memory.wait(shared.full.at[place])
                tile = self.program.place_of(place, self.half)
                operands: list[Any] = [lambda: self._flat_operand(tile)]
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
                    copies.after_block(number)
                else:
                    products.wait_for_products(len(sums))

        copies.begin()
        jax.lax.fori_loop(0, self.count, go_on, None)
        products.wait_for_products(0)
        return [part[...] for part in sums]

    def _of_scaled_blocks(self) -> jax.Array:
        """The main loop for many rows of 8 bits with a scale for each block.

        The sums of a block are scaled while another consumer's block is multiplied. Otherwise
        consumers would wait for the same copies, multiply at the same time, and scale at the same
        time, while the tensor cores idle. So they take turns: a consumer's products begin after
        those of the previous consumer.
        """
        call, shared = self.call, self.program.shared
        shape, width = (WARPGROUP_OUTPUTS, call.config.tile_m), call.format.plane_width
        turn, next_turn = (
            shared.turns.at[jax.lax.rem(self.column + later, call.columns)] for later in range(2)
        )
        # Column 0 has the first turn, as if the last consumer had begun already.
        pl.when(self.column == call.columns - 1)(lambda: memory.arrive(next_turn))

        def go_on(number: jax.Array, sums: jax.Array) -> jax.Array:
            block = self._load(number)
            operands = [decode() for decode in self._decoders(block, scaled=False)]

            def multiply(total: Any) -> None:
                for plane, weights in enumerate(operands):
                    channels = pl.ds(plane * width, width)
                    products.multiply(total, weights, shared.x_tiles.at[block.slot, :, channels])
                memory.arrive(next_turn)
                products.wait_for_products(0)

            start = memory.full(shape, integer_sums.OFFSET_BITS, jnp.int32)
            memory.wait(turn)
            total = products.accumulate_from(start, multiply, self.scratch)
            # Loaded only now: before, sums and operands occupy most registers.
            scales = memory.load_column(shared.x_scale_tiles.at[block.slot, 0])
            memory.arrive(shared.free.at[block.slot])
            parameters = integer_sums.without_last_bits(block.parameters[0])
            group = call.kind.load(parameters, call.scale_dtype, call.operand, shape[1])
            assert group.scale is not None
            total = integer_sums.scaled(total, group.scale)
            return current_target().multiply_add(total, scales, sums)

        zeros = memory.zeros(shape, jnp.float32)
        return jax.lax.fori_loop(0, self.count, go_on, zeros)

    def _flat_operand(self, tile: jax.Array) -> Any:
        """A reference to this consumer's words [64, K of a block] in a tile of flat words."""
        words = self.program.shared.word_tiles
        if self.call.is_plain:
            return products.Transposed(words.at[tile, :, self.outputs])
        return words.at[tile, self.outputs, :]

    def _free_before(self, step: jax.Array, barriers: Any, slots: int, running: int = 1) -> None:
        """Frees the slot of step − 1, after its products have ended.

        running: the number of products that the current step has begun.
        """
        products.wait_for_products(running)
        before = self.program.slot(self.share, step + slots - 1, slots)
        pl.when(step > 0)(lambda: memory.arrive(barriers.at[before]))

    def _load(self, number: jax.Array) -> Block:
        """Waits for block `number` of this share, and loads it into registers."""
        call, shared = self.call, self.program.shared
        format, width = call.format, call.format.plane_width
        place = self.program.slot(self.share, number, call.stages.blocks)
        memory.wait(shared.full.at[place])
        tile = self.program.place_of(place, self.half)
        words = [
            memory.load(
                shared.word_tiles.at[tile, self.outputs, pl.ds(first, width)],
            )
            for first in range(0, format.columns * width, width)
        ]
        if not call.has_groups:
            assert self.output_parameters is not None
            return Block(place, words, [self.output_parameters])
        rows = [
            memory.load_row(shared.parameter_tiles.at[tile, word, self.outputs])
            for word in range(format.parameters_of_block)
        ]
        parameters = [part for row in rows for part in call.kind.split_parameters(row)]
        return Block(place, words, parameters)

    def _decoders(self, block: Block, *, scaled: bool) -> list[Callable[[], jax.Array]]:
        """Functions that decode each plane of a block to an operand [64, plane width].

        scaled: whether the operand is multiplied by the group's scale.
        """
        call, kind, operand = self.call, self.call.kind, self.call.operand
        planes, groups = call.format.planes, len(block.parameters)

        def of_group(row: jax.Array) -> code_kinds.Decoder:
            group = kind.load(row, call.scale_dtype, operand, call.format.plane_width)
            if scaled:
                return kind.scaled_decoder(block.words, group, self.table, operand)
            return kind.decoder(block.words, group.arguments, self.table, operand)

        decode = [of_group(row) for row in block.parameters]
        return [
            functools.partial(decode[plane * groups // planes], plane) for plane in range(planes)
        ]
