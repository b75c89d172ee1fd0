"""The configurations of grouped products: those of dense products, and how tiles are found."""

from __future__ import annotations

import dataclasses
from typing import ClassVar, Literal

from mpjax.kernels.gemm.plans import TritonConfig, WarpgroupConfig

Tiling = Literal["pairs", "counted", "sorted"]
WARPGROUP_TILINGS: tuple[Tiling, ...] = ("counted", "sorted")  # tiles of `pairs` have one row
PLAIN_CHANNELS = 64  # input channels of a step of the kernel, for plain weights


@dataclasses.dataclass(frozen=True)
class ExpertsConfig(TritonConfig):
    """Tile sizes and compiler settings of Triton's kernel; `unsplit` is not used.

    tiling: how tiles of one expert's tokens are found: `pairs`, a tile for each pair of a token and
        an expert; `counted`, a kernel that counts each expert's pairs; `sorted`, a sort of all
        pairs.
    """

    tiling: Tiling = "sorted"

    def __str__(self) -> str:
        return f"{super().__str__()}, tiles {self.tiling}"


@dataclasses.dataclass(frozen=True)
class ExpertsWarpgroupConfig(WarpgroupConfig):
    """Tile sizes of the warpgroup kernel; there is one split and one share.

    tiling: one of WARPGROUP_TILINGS.

    Raises ValueError for another tiling.
    """

    most_out_tiles: ClassVar[int] = 16
    # Then 48 of a thread's 112 registers are sums; no format's kernel spills registers.
    most_rows_of_four: ClassVar[int] = 96
    tiling: Tiling = "sorted"

    def __post_init__(self) -> None:
        if self.tiling not in WARPGROUP_TILINGS:
            raise ValueError(f"tiling is {self.tiling!r}, expected one of {WARPGROUP_TILINGS}")

    def __str__(self) -> str:
        return f"{super().__str__()}, tiles {self.tiling}"
