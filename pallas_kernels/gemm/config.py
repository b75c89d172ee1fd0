"""What a GEMM can be told about how to run."""

from __future__ import annotations

import dataclasses
from typing import Literal

from mpjax.kernels.mosaic import WARPGROUP_OUTPUTS

ROWS = 8  # that tiles of warpgroups come in: Pallas tiles whole arrays in memory by so many
INTEGER_ROWS = 16  # likewise, of more than 32, as `wgmma` multiplies int8
PRODUCT_ROWS = {2: 256, 3: 128, 4: 128}  # that one `wgmma` can multiply, by a program's warpgroups
FEW_ROWS = 32  # of a tile of theirs: to so many, sums are scaled rather than weights
TURN_ROWS = 16  # likewise, one group's while the next group is multiplied
# Likewise, each warp multiplies for itself: of codes that are computed, and of those looked up.
LEAST_ROWS, LEAST_ROWS_OF_TABLES = 16, 8

Implementation = Literal["triton", "mosaic", "dequantize", "xla", "reference"]


@dataclasses.dataclass(frozen=True)
class GemmConfig:
    """Tile sizes and compiler settings of one launch of Triton's kernel.

    tile_m, tile_n: rows of x and output channels of a program's tile.
    splits: programs that share a tile, each with a part of K.
    warps, stages: the compiler's; stages is how many steps of K are in flight.
    scaling: where the scale of a group is applied: to the float32 `accumulator`, once per output
        and group, or to each decoded `weight`, rounded to 16 bits; which is fewer instructions
        depends on tile_m, and only formats with group scales and 16-bit activations have a choice.
    width: lanes of each plane that a step takes, a divisor of the format's plane width, or None for
        all: fewer, where the tile of x for a whole block would not fit shared memory.
    unsplit: output channels, a multiple of tile_n, whose tiles are not split, but computed before
        the others, in a launch of their own; None to split all. As many tiles as multiprocessors
        work off at once need no splits; those that are left over would keep only a few of them
        busy.
    """

    tile_m: int
    tile_n: int
    splits: int
    warps: int
    stages: int
    scaling: Literal["accumulator", "weight"] = "accumulator"
    width: int | None = None
    unsplit: int | None = None

    def __str__(self) -> str:
        past = "" if self.unsplit is None else f" past channel {self.unsplit}"
        return (
            f"{self.tile_m}x{self.tile_n}, {self.splits} splits{past}, {self.warps} warps, "
            f"{self.stages} stages, scaling the {self.scaling}"
            + ("" if self.width is None else f", {self.width} lanes")
        )


@dataclasses.dataclass(frozen=True)
class WarpgroupConfig:
    """Tile sizes of one launch of the warpgroups' kernel.

    tile_m: rows of x in a program's tile.
    warpgroups: that compute, 64 output channels each.
    splits: programs that share a tile, each with a part of K.
    shares: warpgroups of a program that share 64 output channels, each with a part of K; a divisor
        of `warpgroups`.
    """

    tile_m: int
    warpgroups: int
    splits: int
    shares: int = 1

    @property
    def has_few_rows(self) -> bool:
        """Whether sums are scaled rather than weights, as they are fewer."""
        return self.tile_m <= FEW_ROWS

    def multiplies_now(self, *, looks_up: bool) -> bool:
        """Whether tiles are so low that nothing is gained by products that can be waited for.

        looks_up: whether codes are, in the shared memory that each warp would read all of x from.
        """
        return self.tile_m <= (LEAST_ROWS_OF_TABLES if looks_up else LEAST_ROWS)

    def multiplies_in_turn(self, bits: int) -> bool:
        """Whether a group's sums are scaled while the next group is multiplied, in other registers.

        Where products are waited for, as those of tables are.
        bits: of a code. Tables of fewer than four are in registers, too: four warpgroups lack some.
        """
        return self.tile_m <= TURN_ROWS and (bits == 4 or self.warpgroups < 4)

    @property
    def products(self) -> tuple[int, ...]:
        """Rows of x of each product, where x is of 8 bits.

        The sums of one instruction have to fit the registers that threads are launched with, before
        those that copy have given theirs away.
        """
        fits = self.tile_m <= PRODUCT_ROWS[self.warpgroups]
        return (self.tile_m,) if fits else (self.tile_m // 2,) * 2

    @property
    def is_cluster(self) -> bool:
        """Whether splits are added on the chip.

        Programs of a cluster run at the same time, close to each other. With more than two of them
        not all multiprocessors of an H200 can be in one.
        """
        return self.splits == 2 and self.has_few_rows

    @property
    def finished_rows(self) -> int:
        """Rows that a program finishes: in a cluster half, if that is a multiple of ROWS."""
        is_halved = self.is_cluster and self.tile_m % (2 * ROWS) == 0
        return self.tile_m // 2 if is_halved else self.tile_m

    @property
    def tile_n(self) -> int:
        """Output channels of a program's tile."""
        return WARPGROUP_OUTPUTS * (self.warpgroups // self.shares)

    def __str__(self) -> str:
        shared = "" if self.shares == 1 else f" by {self.shares} warpgroups each"
        return f"{self.tile_m}x{self.tile_n}{shared}, {self.splits} splits"


@dataclasses.dataclass(frozen=True)
class Plan:
    """An implementation of a product, with the configuration that a fused kernel needs."""

    implementation: Literal["triton", "mosaic", "dequantize", "xla"]
    config: GemmConfig | WarpgroupConfig | None = None
