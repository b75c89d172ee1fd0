"""What follows the main loop of warpgroups: sums of the same outputs meet, and one writes them out.

Warpgroups of a program that share outputs send theirs to the first one of them. Of two programs
that are a cluster, each then finishes half of the rows, and sends the sums of the other half
across, both at the same time.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels import mosaic
from pallas_kernels.gemm.config import CHANNELS, WarpgroupConfig


def scratch(config: WarpgroupConfig, dtype: jnp.dtype, *, is_cluster: bool) -> dict[str, Any]:
    """What an `Epilogue` has in shared memory, by name, for sums of a dtype."""
    columns, senders = config.warpgroups // config.shares, config.shares - 1
    arrays: dict[str, Any] = {}
    if senders:
        arrays["shared_sums"] = mosaic.shared((senders, columns, CHANNELS, config.tile_m), dtype)
        arrays["shared"] = mosaic.Barrier(num_arrivals=senders, num_barriers=columns)
    if is_cluster:
        arrays["crossed_sums"] = mosaic.shared((columns, CHANNELS, config.finished_rows), dtype)
        arrays["crossed"] = mosaic.Barrier(num_arrivals=columns)
    return arrays


@dataclasses.dataclass(frozen=True)
class Epilogue:
    """The end of a warpgroup's work.

    column: of 64 outputs, which of the program's this warpgroup has.
    share: of K, which of the column's it has.
    rank: of the program, in its cluster; axis: of the cluster, or None where there is none.
    finish: scales and writes out sums [64, n] of one product after the other, from a row on.
    """

    column: Any
    share: Any
    rank: Any
    axis: str | None
    finish: Callable[[Sequence[jax.Array], int], None]
    interpret: bool
    shared_sums: Any = None  # [senders, columns, 64, tile_m], where warpgroups share outputs
    shared: Any = None  # a barrier for each column
    crossed_sums: Any = None  # [columns, 64, rows that a program finishes], in a cluster
    crossed: Any = None  # a barrier, one for all columns: see `mosaic.send`

    def run(self, sums: Sequence[jax.Array]) -> None:
        """Joins these sums with those of other warpgroups, and finishes them."""
        if self.shared is None:
            self._cross(sums)
            return
        [own] = sums
        full = self.shared.at[self.column]

        @pl.when(self.share > 0)
        def _send() -> None:
            mosaic.send(own, self.shared_sums.at[self.share - 1, self.column], full)

        @pl.when(self.share == 0)
        def _add() -> None:
            mosaic.wait(full)
            total = own
            for sender in range(self.shared_sums.shape[0]):
                tile = self.shared_sums.at[sender, self.column]
                total += mosaic.load(tile, interpret=self.interpret)
            self._cross([total])

    def _cross(self, sums: Sequence[jax.Array]) -> None:
        if self.crossed is None:
            self.finish(sums, 0)
            return
        [own] = sums
        tile = self.crossed_sums.at[self.column]
        rows = self.crossed_sums.shape[-1]
        parts = [own[:, first : first + rows] for first in range(0, own.shape[1], rows)]

        def exchange(rank: int) -> None:
            other = 1 - rank
            if other < len(parts):
                mosaic.send(parts[other], tile, self.crossed, axis=self.axis, program=other)
            if rank < len(parts):
                mosaic.wait(self.crossed)
                total = parts[rank] + mosaic.load(tile, interpret=self.interpret)
                self.finish([total], rank * rows)

        for rank in range(2):
            pl.when(self.rank == rank)(functools.partial(exchange, rank))
