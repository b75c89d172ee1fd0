"""Models of the time of a product by warpgroups, fitted to measurements on an H200.

A multiprocessor runs one program at a time, so programs run in rounds, each of as many programs as
there are multiprocessors. The time of a product is the sum of

- the launch;
- for each round, its beginning (the first loads), and the blocks of K of a program;
- the addition of splits, if there are any, by a cluster or by a separate kernel.

A block takes as long as the slowest of the things that run at the same time: decoding, the tensor
cores, and reading the L2 cache. Each main loop of `warpgroups.consumer` has a model (`ManyRows`,
`FewRows`, `EightBits`), whose method `block` has the formula, and each kind of codes has constants
for it. All times are in microseconds.

If there are more than ROW_MULTIPLE rows, and not a multiple of it, they are copied first; that time
is not counted.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from mpjax.kernels.formats import WeightFormat
from mpjax.kernels.gemm.plans.configuration import WarpgroupConfig
from mpjax.kernels.gemm.plans.problem import Problem
from mpjax.kernels.mosaic import WARPGROUP_OUTPUTS

MEGABYTE_OF_SUMS = 0.38  # to write and read a megabyte of partial sums
FITTED_BLOCK = 256  # input channels in a block of uint4:g128, to which `FewRows.wait` was fitted


class ManyRows(NamedTuple):
    """Times for tiles of many rows, whose weights are decoded to 16 bits.

    For each plane, consumers wait for a tile of x, and each consumer decodes a tile of weights and
    begins a product. The defaults were fitted to uint4:g128.
    """

    launch: float = 1.35
    beginning: float = 1.97  # of each round
    wait: float = 0.0447  # of each plane
    plane: float = 0.0544  # of each plane and warpgroup
    warpgroup: float = 0.0  # of each plane and warpgroup, for every 64 input channels of a plane
    row_wait: float = 0.00067  # as `warpgroup`, for each row of the tile
    row_product: float = 0.00118  # as `row_wait`, if the tensor cores are slower than decoding
    sum: float = 0.83  # of the kernel that adds splits

    def block(self, config: WarpgroupConfig, format: WeightFormat, programs: int) -> float:
        """The time of a block of K in each round: for each plane, of decoding or of the product."""
        share, warpgroups = format.plane_width / WARPGROUP_OUTPUTS, config.warpgroups
        wait = self.wait + warpgroups * (
            self.plane + share * (self.warpgroup + self.row_wait * config.tile_m)
        )
        product = share * self.row_product * warpgroups * config.tile_m
        return format.planes * max(wait, product)


class FewRows(NamedTuple):
    """Times for tiles of few rows, whose weights are decoded to 16 bits.

    A block of K takes as long as decoding it, or as reading its words and x from the L2 cache.
    """

    launch: float
    beginning: float  # of each round
    wait: float  # of each block
    warpgroup: float  # of each block and warpgroup
    row: float  # of each block, warpgroup and row of the tile
    megabyte: float  # to read a megabyte of words and x from the L2 cache
    cluster: float  # to add the sums of a cluster's programs, in each round
    share: float  # to add the sums that one warpgroup sends to another
    sum: float  # of the kernel that adds splits

    def block(self, config: WarpgroupConfig, format: WeightFormat, programs: int) -> float:
        """The time of one block of K for each of `config.shares` warpgroups, in each round."""
        wait = self.wait + config.warpgroups * (self.warpgroup + self.row * config.tile_m)
        wait *= max(1, format.block / FITTED_BLOCK)
        nbytes = format.block * (config.tile_n * format.bits / 8 + 2 * config.tile_m)
        return max(wait, self.megabyte * config.shares * nbytes * programs * 1e-6)


class EightBits(NamedTuple):
    """Times for products of two 8-bit operands, and of plain matrices in 16 bits.

    A block of K takes as long as multiplying it, or as reading its words and x from the L2 cache;
    all blocks together at least as long as reading the matrix from memory. The defaults were fitted
    to int8/int8, a plain matrix that is not decoded. A block of a 16-bit matrix has half the
    channels, for which the tensor cores take as long.
    """

    launch: float = 0.0
    beginning: float = 3.54  # of each round
    wait: float = 0.0416  # of each block
    warpgroup: float = 0.0  # of each block and warpgroup
    product: float = 0.00114  # of each block, warpgroup and row of the tile
    megabyte: float = 0.0665  # to read a megabyte of words and x from the L2 cache
    megabyte_of_words: float = 0.252  # to read a megabyte of the matrix from memory
    sum: float = 1.76  # of the kernel that adds splits

    def block(self, config: WarpgroupConfig, format: WeightFormat, programs: int) -> float:
        """The time of a block of K in each round."""
        product = self.wait + config.warpgroups * (self.warpgroup + self.product * config.tile_m)
        x_bytes = config.tile_m * format.word_bits / 8
        nbytes = format.block * (config.tile_n * format.bits / 8 + x_bytes)
        return max(product, self.megabyte * nbytes * programs * 1e-6)


# Fitted to uint4:g128, int8/int8 and liquid4, whose times also rank the configurations of int4.
TIMES_OF_MANY_ROWS, TIMES_OF_INT8 = ManyRows(), EightBits()
TIMES_OF_LIQUID4 = EightBits(1.48, 2.21, 0.128, 0.024, 0.00097, 0.123, 0.348, 0.84)
TIMES_OF_FEW_ROWS = FewRows(0.8, 2.27, 0.17, 0.077, 0.0056, 0.105, 1.07, 0.0, 1.46)
TIMES_BY_MMA_SYNC = FewRows(0.89, 2.13, 0.029, 0.208, 0.0034, 0.139, 0.7, 0.074, 1.84)
# Fitted to tables: many rows with codes of three and four bits, few rows also with two bits. With 8
# rows, TIMES_BY_MMA_SYNC is used for tables, too: it is too optimistic for them, but ranks their
# configurations correctly, and only the order matters for the choice.
TIMES_OF_MANY_ROWS_OF_TABLES = ManyRows(0.8, 2.99, 0.0134, 0.0146, 0.0628, 0.0007, 0.0013, 1.01)
TIMES_OF_FEW_ROWS_OF_TABLES = FewRows(0.8, 2.5, 0.323, 0.176, 0.0033, 0.107, 1.08, 0.0, 1.8)


def microseconds(config: WarpgroupConfig, problem: Problem) -> float:
    """The estimated time of a product; on GPUs other than the H200 only the order is meaningful."""
    format, rows, outputs = problem.weight, problem.rows, problem.outputs
    programs = math.ceil(rows / config.tile_m) * math.ceil(outputs / config.tile_n) * config.splits
    rounds = math.ceil(programs / problem.limits.multiprocessors)
    programs = min(programs, problem.limits.multiprocessors)
    blocks = math.ceil(math.ceil(problem.blocks / config.splits) / config.shares)
    times = _times(config, problem)
    time = times.launch + rounds * (
        times.beginning + blocks * times.block(config, format, programs)
    )
    if isinstance(times, EightBits):
        words = problem.channels * outputs * format.bits / 8 * 1e-6
        memory = times.launch + times.beginning + times.megabyte_of_words * words
        # A smooth maximum of both: it exceeds the larger one by up to an eighth if they are equal.
        time = (time**6 + memory**6) ** (1 / 6)
    if isinstance(times, FewRows):
        time += times.share * (config.shares - 1) + rounds * times.cluster * config.is_cluster
    if config.splits > 1 and not config.is_cluster:
        time += times.sum + MEGABYTE_OF_SUMS * config.splits * rows * outputs * 4e-6
    return time


def _times(config: WarpgroupConfig, problem: Problem) -> ManyRows | FewRows | EightBits:
    """The constants for the main loop that a configuration selects."""
    has_table = problem.has_table
    if problem.weight.is_flat:
        return TIMES_OF_INT8
    if not config.has_few_rows:
        if problem.weight.operand:
            return TIMES_OF_LIQUID4
        return TIMES_OF_MANY_ROWS_OF_TABLES if has_table else TIMES_OF_MANY_ROWS
    if config.uses_mma_sync(has_table=has_table):
        return TIMES_BY_MMA_SYNC
    return TIMES_OF_FEW_ROWS_OF_TABLES if has_table else TIMES_OF_FEW_ROWS
