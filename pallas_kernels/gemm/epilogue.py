"""What follows the sums of warpgroups: those of the same outputs meet, and one writes them out.

Warpgroups of a program that share outputs send theirs to the first one of them. Of two programs
that are a cluster, each then finishes half of the rows, and sends the sums of the other half
across, both at the same time; of 8 and 24 rows, which have no such halves, the first finishes all.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from mpjax.kernels.gemm.summing import Summing
from mpjax.kernels.gemm.warpgroup_program import Program
from mpjax.kernels.mosaic import WARPGROUP_OUTPUTS, memory


@dataclasses.dataclass(frozen=True)
class Epilogue:
    """The end of a warpgroup's work.

    summing: what its sums came from, which knows their scales.
    column: of 64 outputs, which of the program's it has.
    share: of K, which of the column's it has.
    """

    program: Program
    summing: Summing
    column: Any
    share: Any

    def run(self, sums: Sequence[jax.Array]) -> None:
        """Joins sums [64, rows] with those of other warpgroups, scales them and writes them out.

        sums: of one product after the other; a single one where there is anything to join.
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
        """Scales and writes out, from a row of the program's tile on."""
        x_scales, channel_row = self.program.arguments.x_scales, self.summing.channel_row
        for part in sums:
            part = part.astype(jnp.float32)
            if channel_row is not None:
                part = self.summing.scaled(part, channel_row)
            if x_scales is not None:
                of_rows = x_scales.at[pl.ds(self.program.first_row + row, part.shape[1])]
                part *= memory.load_column(of_rows)
            self._store(part, row)
            row += part.shape[1]
        memory.wait_for_stores()

    def _store(self, sums: jax.Array, row: int) -> None:
        program, call = self.program, self.program.call
        tile, out = program.shared.out_tiles.at[self.column], program.arguments.out
        for start in range(0, sums.shape[1], tile.shape[0]):
            memory.wait_for_stores()
            part = sums[:, start : start + tile.shape[0]].astype(out.dtype)
            memory.store_transposed(tile, part)
            target = out.at[
                0 if call.axis else program.split,
                pl.ds(program.first_row + row + start, tile.shape[0]),
                pl.ds(program.first_output + self.column * WARPGROUP_OUTPUTS, WARPGROUP_OUTPUTS),
            ]
            memory.copy_out(tile, target)
