"""The epilogue: adds the sums of consumers with the same outputs, scales and stores them.

Consumers of a program that share outputs send their sums to the first of them. Then the two
programs of a cluster exchange sums: each sends half of the rows to the other, both at the same
time, and finishes the other half. Tiles of 8 and 24 rows have no halves that are multiples of 8;
there the first program finishes all rows.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from mpjax.kernels.gemm.warpgroups.consumer import Consumer
from mpjax.kernels.gemm.warpgroups.program import Program
from mpjax.kernels.mosaic import WARPGROUP_OUTPUTS, memory
from mpjax.kernels.target import current_target

# Rows whose sums a gate combines at a time: they fill one swizzled row of shared memory.
GATED_ROWS = memory.SWIZZLED_BYTES // 4


@dataclasses.dataclass(frozen=True)
class Epilogue:
    """The epilogue of a consumer warpgroup.

    consumer: which computed the sums, and has the scales of output channels.
    column, share: as for Consumer.
    """

    program: Program
    consumer: Consumer
    column: Any
    share: Any

    def run(self, sums: Sequence[jax.Array]) -> None:
        """Completes a warpgroup's sums over K, scales them, and stores them.

        Warpgroups with the same outputs and other parts of K send their sums to the first of them
        (share 0) through shared memory; only the first continues with the total.

        sums: arrays [64 outputs, rows] of this warpgroup, one for each of `config.product_rows`,
            which divide the rows of its tile. Tiles with shared or crossed sums have a single
            array.
        """
        shared = self.program.shared
        if shared.shared_sums is None:
            self._cross(sums)
            return
        [own] = sums
        full = shared.shared_full.at[self.column]

        @pl.when(self.share > 0)
        def _send() -> None:
            memory.send(own, shared.shared_sums.at[self.share - 1, self.column], full)

        @pl.when(self.share == 0)
        def _add() -> None:
            memory.wait(full)
            total = own
            for sender in range(shared.shared_sums.shape[0]):
                tile = shared.shared_sums.at[sender, self.column]
                total += memory.load(tile)
            self._cross([total])

    def _cross(self, sums: Sequence[jax.Array]) -> None:
        """Exchanges sums with the other program of a cluster, if there is one, and finishes.

        Program 0 finishes the first rows of the tile and program 1 the other rows, if there are
        any: each sends the other's rows, and adds the received rows to its own.
        """
        call, shared = self.program.call, self.program.shared
        if shared.crossed_sums is None:
            self._finish(sums, 0)
            return
        [own] = sums
        tile, full = shared.crossed_sums.at[self.column], shared.crossed_full
        rows = shared.crossed_sums.shape[-1]
        parts = [own[:, first : first + rows] for first in range(0, own.shape[1], rows)]

        def exchange(rank: int) -> None:
            other = 1 - rank
            if other < len(parts):
                memory.send(parts[other], tile, full, axis=call.axis, program=other)
            if rank < len(parts):
                memory.wait(full)
                total = parts[rank] + memory.load(tile)
                self._finish([total], rank * rows)

        for rank in range(2):
            pl.when(self.program.split == rank)(functools.partial(exchange, rank))

    def _finish(self, sums: Sequence[jax.Array], row: int) -> None:
        """Scales complete sums and stores them, with a gate combined with the up values.

        row: the first row of the sums, relative to the first row of the program's tile.
        """
        if self.program.call.gate is not None:
            self._join(sums)
            return
        for part in sums:
            self._store(self._scaled(part, row), row)
            row += part.shape[1]
        memory.wait_for_stores()

    def _scaled(self, sums: jax.Array, row: int) -> jax.Array:
        """The products [64, rows] of complete sums, with scales and bias applied."""
        arguments, parameters = self.program.arguments, self.consumer.output_parameters
        product = sums.astype(jnp.float32)
        if parameters is not None:
            product = self.consumer.scaled(product, parameters)
        if arguments.x_scales is not None:
            product *= self._of_rows(arguments.x_scales, row, product)
        if arguments.bias is not None:
            bias = memory.load_row(arguments.bias.at[self.consumer.output_range])
            product += current_target().column(bias, product.shape[1])
        return product

    def _of_rows(self, values: Any, row: int, product: jax.Array) -> jax.Array:
        """The values of a product's rows, broadcast to its shape [64, rows]."""
        of_rows = values.at[pl.ds(self.program.first_row + row, product.shape[1])]
        return memory.load_column(of_rows)

    def _join(self, sums: Sequence[jax.Array]) -> None:
        """Applies the gate: the consumer of up values sends them to the consumer of gate values."""
        shared, gate = self.program.shared, self.program.call.gate
        assert gate is not None
        pair = jax.lax.rem(self.column, self.program.call.columns // 2)
        rows = sums[0].shape[1]
        size = max(math.gcd(rows, GATED_ROWS), self.program.call.stages.out_rows)

        @pl.when(self.consumer.half == 1)
        def _send() -> None:
            for number, part in enumerate(sums):
                up = self._scaled(part, number * rows)
                memory.send(up, shared.up_sums.at[pair, number], shared.up_full.at[pair])

        @pl.when(self.consumer.half == 0)
        def _apply() -> None:
            memory.wait(shared.up_full.at[pair])
            for number, part in enumerate(sums):
                product = self._scaled(part, number * rows)
                for first in range(0, rows, size):  # so that both fit the registers
                    up = memory.load(shared.up_sums.at[pair, number, :, pl.ds(first, size)])
                    joined = gate(product[:, first : first + size], up)
                    self._store(joined, number * rows + first)
            memory.wait_for_stores()

    def _store(self, sums: jax.Array, row: int) -> None:
        """Stores sums [64, rows] through tiles in shared memory, some rows at a time."""
        program, call = self.program, self.program.call
        rows, tiles = call.stages.out_rows, call.stages.out_tiles
        if program.arguments.row_weights is not None:
            sums *= self._of_rows(program.arguments.row_weights, row, sums)
        out = program.arguments.out
        for start in range(0, sums.shape[1], rows):
            number = (row + start) // rows
            tile = program.shared.out_tiles.at[self.column, pl.ds(number % tiles * rows, rows)]
            if tiles == 1 or number >= tiles:  # else nothing has been copied from the tile
                memory.wait_for_stores(tiles - 1)
            part = sums[:, start : start + rows].astype(out.dtype)
            memory.store_transposed(tile, part)
            target = out.at[
                0 if call.axis else program.split,
                pl.ds(program.first_row + row + start, rows),
                pl.ds(program.first_output + self.column * WARPGROUP_OUTPUTS, WARPGROUP_OUTPUTS),
            ]
            memory.copy_out(tile, target)
