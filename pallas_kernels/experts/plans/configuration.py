"""The configuration of a grouped product's kernel: that of a product, and how tiles are found."""

from __future__ import annotations

import dataclasses
from typing import Literal, get_args

from mpjax.kernels.gemm.plans import TritonConfig

Tiling = Literal["pairs", "counted", "sorted"]
TILINGS: tuple[Tiling, ...] = get_args(Tiling)
PLAIN_CHANNELS = 64  # input channels of a step of the kernel, for plain weights


@dataclasses.dataclass(frozen=True)
class ExpertsConfig(TritonConfig):
    """Tile sizes and compiler settings of a launch; `unsplit` is not used.

    tiling: how tiles of one expert's tokens are found: a tile for each pair of a token and an
        expert; by a kernel that counts the pairs of each expert; or by sorting all pairs.
    """

    tiling: Tiling = "sorted"

    def __str__(self) -> str:
        return f"{super().__str__()}, tiles {self.tiling}"
