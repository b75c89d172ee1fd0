"""The rule of thumb for the warpgroups' kernel: which tiles a product of many rows is cut into."""

from __future__ import annotations

import itertools
import math

from pallas_kernels.formats import WeightFormat
from pallas_kernels.gemm.config import CHANNELS, ROWS, WarpgroupConfig
from pallas_kernels.gemm.limits import Limits

# A program has a multiprocessor to itself: its threads begin with all registers. With three
# computing warpgroups these are 128 for each thread, and half of them can be sums.
MOST_ROWS = {2: 256, 3: 128}  # of a tile, by warpgroups
MOST_SPLITS = 8
LEAST_BLOCKS = 2  # of K in a program's part
# Microseconds, fitted to 259 products with uint4:g128 on an H200, whose times they give to 5 %, and
# whose best configuration they miss by 0.4 % (all of `gemm.shapes` but llama3-70b.down, from 16
# rows on). Rows that are no multiple of ROWS pay for copies of x and the output, not counted here.
LAUNCH, BEGINNING = 1.35, 1.97  # of the kernel, and of each round of programs
# Of a plane's product of 64 channels: what it waits for, for all and for each warpgroup, for each
# row of the tile where waiting counts and where the tensor cores do.
WAIT, WARPGROUP_WAIT, ROW_WAIT, ROW_PRODUCT = 0.0447, 0.0544, 0.00067, 0.00118
# To sum splits: a kernel, and each megabyte of float32 that is written and read.
SUM, MEGABYTE = 0.83, 0.38


def warpgroup_config(
    rows: int, format: WeightFormat, channels: int, outputs: int, limits: Limits
) -> WarpgroupConfig:
    """The configuration that the model of times finds the fastest."""
    return ranked(rows, format, channels, outputs, limits)[0]


def ranked(
    rows: int, format: WeightFormat, channels: int, outputs: int, limits: Limits
) -> list[WarpgroupConfig]:
    """All sound configurations, the fastest by the model of times first."""
    blocks = -(-channels // format.block)
    heights = {64, 96, 128, 192, 256}
    if rows <= min(heights):
        heights = {-(-rows // ROWS) * ROWS}
    splits = range(1, max(1, min(MOST_SPLITS, blocks // LEAST_BLOCKS)) + 1)
    space = itertools.product(sorted(heights), MOST_ROWS, splits)
    configs = [WarpgroupConfig(*fields) for fields in space]
    sound = [config for config in configs if why_unsound(config) is None]
    return sorted(sound, key=lambda c: microseconds(c, rows, format, channels, outputs, limits))


def why_unsound(config: WarpgroupConfig) -> str | None:
    """Why a configuration can't run; None if it can."""
    if config.warpgroups not in MOST_ROWS:
        return f"{config.warpgroups} warpgroups; there can be {' or '.join(map(str, MOST_ROWS))}"
    if config.tile_m % ROWS or config.tile_m > MOST_ROWS[config.warpgroups]:
        return (
            f"{config.tile_m} rows in a tile of {config.warpgroups} warpgroups; there can be a "
            f"multiple of {ROWS}, to {MOST_ROWS[config.warpgroups]}"
        )
    return None


def microseconds(
    config: WarpgroupConfig,
    rows: int,
    format: WeightFormat,
    channels: int,
    outputs: int,
    limits: Limits,
) -> float:
    """What a product takes, about; of another GPU than the H200, what counts is the order."""
    height, warpgroups, splits = config.tile_m, config.warpgroups, config.splits
    tiles = math.ceil(rows / height) * math.ceil(outputs / (CHANNELS * warpgroups))
    rounds = math.ceil(tiles * splits / limits.multiprocessors)
    planes = math.ceil(math.ceil(channels / format.block) / splits) * format.planes
    share = format.plane_width / CHANNELS
    waiting = WAIT + warpgroups * (WARPGROUP_WAIT + share * ROW_WAIT * height)
    plane = max(waiting, share * ROW_PRODUCT * warpgroups * height)
    time = LAUNCH + rounds * (BEGINNING + planes * plane)
    if splits > 1:
        time += SUM + MEGABYTE * splits * rows * outputs * 4e-6
    return time
