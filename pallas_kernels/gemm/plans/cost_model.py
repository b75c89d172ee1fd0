"""Models of what a product by warpgroups takes, fitted to measurements on an H200.

All have the same parts: the launch; the beginning of each round of programs; each block of K, of
which every warpgroup waits for something and the tensor cores or the L2 cache may be what counts;
and the sum of splits. More rows than ROWS that are no multiple of it pay for copies, which are not
counted.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from mpjax.kernels.formats import WeightFormat
from mpjax.kernels.gemm.plans.configuration import WarpgroupConfig
from mpjax.kernels.gemm.plans.problem import Problem
from mpjax.kernels.mosaic import WARPGROUP_OUTPUTS

MEGABYTE_OF_SUMS = 0.38  # microseconds to write and read it
CHANNELS_OF_BLOCK = 256  # of uint4:g128: what few rows wait for was fitted to its blocks


class ManyRows(NamedTuple):
    """Microseconds of decoded weights with many rows.

    259 products with uint4:g128 are within 5 %, and their best configuration is missed by 0.4 %
    (all of `gemm.shapes` but llama3-70b.down, with this loop from 16 rows on).
    """

    launch: float = 1.35
    beginning: float = 1.97
    wait: float = 0.0447  # of a plane's product, for all warpgroups
    plane: float = 0.0544  # for each of them
    warpgroup: float = 0.0  # likewise, of 64 channels
    row_wait: float = 0.00067  # likewise, for each row
    row_product: float = 0.00118  # likewise, where the tensor cores take longer
    sum: float = 0.83  # of splits: a kernel

    def blocks(self, config: WarpgroupConfig, format: WeightFormat, programs: int) -> float:
        """Of a block, in each round."""
        share, warpgroups = format.plane_width / WARPGROUP_OUTPUTS, config.warpgroups
        wait = self.wait + warpgroups * (
            self.plane + share * (self.warpgroup + self.row_wait * config.tile_m)
        )
        product = share * self.row_product * warpgroups * config.tile_m
        return format.planes * max(wait, product)


class FewRows(NamedTuple):
    """Microseconds of decoded weights with few rows.

    211 products of 8, 16 and 32 rows of all of `gemm.shapes` with uint4:g128 are within 6 % in the
    mean and 21 % at worst; their best configuration is missed by 0.5 %. Of these, 96 had two
    barriers for a block, and count as 3 % less; some had five to seven blocks on their way. What a
    cluster takes was fitted again, to five products, when its programs came to share its rows.
    """

    launch: float
    beginning: float
    # Of a block: for all, for each warpgroup, and for each of its rows.
    wait: float
    warpgroup: float
    row: float
    megabyte: float  # of words and x, that all programs read of the L2 cache
    cluster: float  # to add its splits, in each round
    share: float  # to add what a warpgroup sends
    sum: float

    def blocks(self, config: WarpgroupConfig, format: WeightFormat, programs: int) -> float:
        """Of as many blocks as warpgroups share, in each round."""
        wait = self.wait + config.warpgroups * (self.warpgroup + self.row * config.tile_m)
        wait *= max(1, format.block / CHANNELS_OF_BLOCK)
        nbytes = format.block * (config.tile_n * format.bits / 8 + 2 * config.tile_m)
        return max(wait, self.megabyte * config.shares * nbytes * programs * 1e-6)


class EightBits(NamedTuple):
    """Microseconds of products of 8 bits.

    The defaults are those of matrices that are not decoded: 115 products with int8 of 64 to 4096
    rows of five of `gemm.shapes` are within 6 % in the mean and 22 % at worst; their best
    configuration is missed by 0.5 %, and by 8 % with 512 rows of K4096 N24576.
    """

    launch: float = 0.0
    beginning: float = 3.54
    wait: float = 0.0416  # of a block of 128 channels
    warpgroup: float = 0.0  # likewise, for each of them
    product: float = 0.00114  # for each row of theirs
    megabyte: float = 0.0665
    megabyte_of_words: float = 0.252  # of the whole matrix, in memory
    sum: float = 1.76

    def blocks(self, config: WarpgroupConfig, format: WeightFormat, programs: int) -> float:
        """Of a block, in each round."""
        product = self.wait + config.warpgroups * (self.warpgroup + self.product * config.tile_m)
        nbytes = format.block * (config.tile_n * format.bits / 8 + config.tile_m)
        return max(product, self.megabyte * nbytes * programs * 1e-6)


MANY_ROWS, MATRIX = ManyRows(), EightBits()
# Of `liquid4`: 204 products of 64 to 4096 rows of Qwen3-8B's shapes are within 5 % in the mean and
# 29 % at worst; their best configuration is missed by 0.9 %, by 11 % with 128 rows of K12288 N4096.
LEVELS = EightBits(1.48, 2.21, 0.128, 0.024, 0.00097, 0.123, 0.348, 0.84)
FEW_ROWS = FewRows(0.8, 2.27, 0.17, 0.077, 0.0056, 0.105, 1.07, 0.0, 1.46)
LEAST_ROWS = FewRows(0.89, 2.13, 0.029, 0.208, 0.0034, 0.139, 0.7, 0.074, 1.84)
# Of codes that are looked up, three and four bits: 74 products of 64 rows and more are within 3 %
# in the mean and 11 % at worst; their best configuration is missed by 0.5 %. With two bits as
# well, 195 of 16 and 32 rows are within 4 % and 23 %, their best missed by 0.1 %. Of 8 rows
# LEAST_ROWS is true of their order, which is what counts (missed by 0.1 %), but 15 % too fast.
# Few rows have gained since, three bits the most. What is chosen takes, of three and four bits, in
# tiles of 16 rows up to 14 % less than this says, and of 8 up to 19 % more; of 16 rows of K8192
# N10240 and three bits, three configurations are in the right order.
MANY_ROWS_OF_TABLES = ManyRows(0.8, 2.99, 0.0134, 0.0146, 0.0628, 0.0007, 0.0013, 1.01)
FEW_ROWS_OF_TABLES = FewRows(0.8, 2.5, 0.323, 0.176, 0.0033, 0.107, 1.08, 0.0, 1.8)


def microseconds(config: WarpgroupConfig, problem: Problem) -> float:
    """What a product takes, about; of another GPU than the H200, what counts is the order."""
    format, rows, outputs = problem.weight, problem.rows, problem.outputs
    programs = math.ceil(rows / config.tile_m) * math.ceil(outputs / config.tile_n) * config.splits
    rounds = math.ceil(programs / problem.limits.multiprocessors)
    programs = min(programs, problem.limits.multiprocessors)
    blocks = math.ceil(math.ceil(problem.blocks / config.splits) / config.shares)
    times = _times(config, problem)
    time = times.launch + rounds * (
        times.beginning + blocks * times.blocks(config, format, programs)
    )
    if isinstance(times, EightBits):
        words = problem.channels * outputs * format.bits / 8 * 1e-6
        memory = times.launch + times.beginning + times.megabyte_of_words * words
        time = (time**6 + memory**6) ** (1 / 6)  # the larger one, and something of the other
    if isinstance(times, FewRows):
        time += times.share * (config.shares - 1) + rounds * times.cluster * config.is_cluster
    if config.splits > 1 and not config.is_cluster:
        time += times.sum + MEGABYTE_OF_SUMS * config.splits * rows * outputs * 4e-6
    return time


def _times(config: WarpgroupConfig, problem: Problem) -> ManyRows | FewRows | EightBits:
    """The model that a configuration's loop was fitted with."""
    has_table = problem.has_table
    if problem.weight.is_flat:
        return MATRIX
    if not config.has_few_rows:
        if problem.weight.operand:
            return LEVELS
        return MANY_ROWS_OF_TABLES if has_table else MANY_ROWS
    if config.multiplies_now(looks_up=has_table):
        return LEAST_ROWS
    return FEW_ROWS_OF_TABLES if has_table else FEW_ROWS
