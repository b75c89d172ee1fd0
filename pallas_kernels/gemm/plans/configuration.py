"""Configurations of the fused kernels: tiles and settings of a launch."""

from __future__ import annotations

import dataclasses
from typing import ClassVar, Literal, get_args

from mpjax.kernels.mosaic import WARPGROUP_OUTPUTS

# Rows of x in a tile of the warpgroup kernel.
ROW_MULTIPLE = 8  # a tile's rows are a multiple: Pallas tiles arrays in memory by 8 rows
INT8_ROW_MULTIPLE = 16  # with more than FEW_ROWS rows, the multiple that `wgmma` has for int8
WGMMA_ROWS = {2: 256, 3: 128, 4: 128}  # the most rows of one `wgmma`, by a program's warpgroups
FEW_ROWS = 32  # up to this number of rows, sums are scaled instead of weights
OVERLAP_ROWS = 16  # up to this number, a group's sums can be scaled during the next product
# Up to these numbers, warps multiply by `mma.sync`: with computed codes, and with codes of a table.
MMA_SYNC_ROWS, MMA_SYNC_ROWS_OF_TABLES = 16, 8

Implementation = Literal["triton", "mosaic", "dequantize", "xla", "reference"]
Scaling = Literal["accumulator", "weight"]
SCALINGS: tuple[Scaling, ...] = get_args(Scaling)


@dataclasses.dataclass(frozen=True)
class TritonConfig:
    """Tile sizes and compiler settings of one launch of Triton's kernel.

    tile_m, tile_n: rows of x and output channels of a program's tile.
    splits: the number of programs that share a tile, each with a part of K.
    warps, stages: the compiler's `num_warps` and `num_stages`; stages is the number of steps of K
        whose loads are in flight.
    scaling: where the scale of a group is applied: to the float32 `accumulator`, once per output
        and group, or to each decoded `weight`, which is then rounded to 16 bits. Which takes fewer
        instructions depends on tile_m. Only formats with group scales and 16-bit activations have
        a choice.
    width: the lanes of each plane in a step, a divisor of the format's plane width; None for all.
        Fewer lanes are for tiles of x that would not fit shared memory with a whole block.
    unsplit: the first output channels, up to this multiple of tile_n, are not split; they are
        computed in a separate launch before the others. None splits all. Tiles that fill all
        multiprocessors for whole rounds need no splits; the remaining tiles, if not split, would
        leave most multiprocessors idle.
    serial: whether one program computes all splits of a tile, one after another, and adds up their
        sums in order; None for no.
    """

    tile_m: int
    tile_n: int
    splits: int
    warps: int
    stages: int
    scaling: Scaling = "accumulator"
    width: int | None = None
    unsplit: int | None = None
    serial: bool | None = None

    def why_not(self) -> str | None:
        """The reason why no product can have this configuration, or None if some can."""
        for name in ("tile_m", "tile_n", "warps", "width"):
            value = getattr(self, name)
            if value is not None and value & (value - 1):
                return f"{name} is {value}, expected a power of two"
        if self.unsplit is not None and self.unsplit % self.tile_n:
            return f"unsplit is {self.unsplit}, expected a multiple of tile_n"
        return None

    def __str__(self) -> str:
        past = "" if self.unsplit is None else f" past channel {self.unsplit}"
        past += " in turn" if self.serial else ""
        return (
            f"{self.tile_m}x{self.tile_n}, {self.splits} splits{past}, {self.warps} warps, "
            f"{self.stages} stages, scaling the {self.scaling}"
            + ("" if self.width is None else f", {self.width} lanes")
        )


@dataclasses.dataclass(frozen=True)
class WarpgroupConfig:
    """Tile sizes of one launch of the warpgroup kernel.

    tile_m: rows of x in a program's tile.
    warpgroups: the number of a program's consumers, each with 64 output channels.
    splits: the number of programs that share a tile, each with a part of K.
    shares: the number of a program's consumers that share the same 64 output channels, each with a
        part of the program's K; a divisor of `warpgroups`.
    most_out_tiles: the most tiles of a consumer's products that are being copied out at a time.
    most_rows_of_four: the most rows of a tile with four consumers that decode to 16 bits.
    """

    most_out_tiles: ClassVar[int] = 1
    most_rows_of_four: ClassVar[int] = FEW_ROWS
    tile_m: int
    warpgroups: int
    splits: int
    shares: int = 1

    @property
    def has_few_rows(self) -> bool:
        """Whether a tile has so few rows that scaling sums is cheaper than scaling weights."""
        return self.tile_m <= FEW_ROWS

    def uses_mma_sync(self, *, has_table: bool) -> bool:
        """Whether warps multiply by `mma.sync`: tiles have so few rows that `wgmma` gains nothing.

        has_table: whether decoding uses a table in shared memory. Each warp also loads all of x
            from there, so the limit is lower.
        """
        return self.tile_m <= (MMA_SYNC_ROWS_OF_TABLES if has_table else MMA_SYNC_ROWS)

    def overlaps_groups(self, bits: int) -> bool:
        """Whether a group's sums are scaled while `wgmma` adds the next group's to other registers.

        bits: of a code. Tables with codes of fewer than four bits are also kept in registers, of
            which four warpgroups have too few.
        """
        return self.tile_m <= OVERLAP_ROWS and (bits == 4 or self.warpgroups < 4)

    @property
    def product_rows(self) -> tuple[int, ...]:
        """The rows of x in each `wgmma` of a tile, for 8-bit x: one product, or two halves.

        The sums of one instruction must fit the registers that a thread has at the launch, before
        the producer has given its registers away.
        """
        fits = self.tile_m <= WGMMA_ROWS[self.warpgroups]
        return (self.tile_m,) if fits else (self.tile_m // 2,) * 2

    @property
    def is_cluster(self) -> bool:
        """Whether the programs that share a tile form a cluster, which adds their sums on the chip.

        Programs of a cluster run at the same time, on neighbouring multiprocessors. Clusters have
        two
        programs: larger ones can't use all multiprocessors of an H200.
        """
        return self.splits == 2 and self.has_few_rows

    @property
    def finished_rows(self) -> int:
        """The rows whose sums a program writes out.

        In a cluster each program writes half, unless half is not a multiple of ROW_MULTIPLE.
        """
        is_halved = self.is_cluster and self.tile_m % (2 * ROW_MULTIPLE) == 0
        return self.tile_m // 2 if is_halved else self.tile_m

    @property
    def tile_n(self) -> int:
        """Output channels of a program's tile."""
        return WARPGROUP_OUTPUTS * (self.warpgroups // self.shares)

    def __str__(self) -> str:
        shared = "" if self.shares == 1 else f" by {self.shares} warpgroups each"
        return f"{self.tile_m}x{self.tile_n}{shared}, {self.splits} splits"
