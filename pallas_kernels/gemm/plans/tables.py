"""Tables of measured plans of products: their keys, and the checks of their entries."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from mpjax.kernels.formats import WeightFormat
from mpjax.kernels.gemm.plans import limits
from mpjax.kernels.gemm.plans.configuration import (
    ROW_MULTIPLE,
    SCALINGS,
    TritonConfig,
    WarpgroupConfig,
)
from mpjax.kernels.gemm.plans.problem import Problem
from mpjax.kernels.gemm.plans.warpgroup_rule import why_unsound
from mpjax.kernels.plans.plan import Entry, Plan
from mpjax.kernels.plans.tables import Table, Tables
from mpjax.kernels.product_format import ProductFormat

# The numbers of rows for which plans are measured. A problem with other rows uses the next larger
# bucket. Up to 32 rows, multiples of ROW_MULTIPLE have their own buckets, because the warpgroups'
# kernel pads other numbers of rows above ROW_MULTIPLE.
BUCKETS = (7, 8, 15, 16, 31, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
POWERS_OF_TWO = {"tile_m", "tile_n", "warps", "width"}  # fields of a TritonConfig


class Key(NamedTuple):
    """The key of a plan.

    format: the weight format's text. channels, outputs: K and N. rows: one of BUCKETS.
    """

    format: str
    channels: int
    outputs: int
    rows: int


def bucket(rows: int) -> int:
    """The bucket of a number of rows: the next of BUCKETS, or the last for more rows.

    Up to 32 rows, a multiple of ROW_MULTIPLE has the next bucket that is a multiple, too: 24 rows
    have the bucket 32, but 23 rows the bucket 31.
    """
    size = next((size for size in BUCKETS if rows <= size), BUCKETS[-1])
    return size + 1 if rows % ROW_MULTIPLE == 0 and size % ROW_MULTIPLE else size


class ProductTables(Tables[Problem]):
    """The measured plans of products, by format, shape `KxN`, such as `4096x24576`, and bucket."""

    operation = "gemm"
    levels = 3
    configs: Mapping[str, type | None] = {
        "triton": TritonConfig,
        "mosaic": WarpgroupConfig,
        "dequantize": None,
        "xla": None,
    }

    def key_of(self, problem: Problem) -> Key:
        """The key of a problem, with the bucket of its rows."""
        rows = bucket(problem.rows)
        return Key(str(problem.format), problem.channels, problem.outputs, rows)

    def names(self, key: Key) -> tuple[str, ...]:
        """The names of a key, such as `uint4:g128`, `4096x24576` and `64`."""
        return key.format, f"{key.channels}x{key.outputs}", str(key.rows)

    def key(self, names: tuple[str, ...]) -> Key:
        """The inverse of `names`; raises ValueError for names that a table can't have."""
        text, shape, rows = names
        format = ProductFormat.of(text)
        match = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", shape)
        if match is None:
            raise ValueError(f"{text}: the shape {shape!r} is not KxN, such as 4096x24576")
        if rows not in map(str, BUCKETS):
            raise ValueError(f"{' '.join(names)}: rows must be one of {BUCKETS}")
        if str(format) != text:
            raise ValueError(f"{' '.join(names)}: the format is written {str(format)!r} in a table")
        return Key(text, int(match[1]), int(match[2]), int(rows))

    def find(self, table: Table, key: Key) -> Entry | None:
        """The entry of a key, or None.

        A bucket without an entry uses the one for the next multiple of ROW_MULTIPLE rows, unless
        that entry's plan is the warpgroups' kernel.
        """
        if key in table.entries or not key.rows % ROW_MULTIPLE:
            return table.entries.get(key)
        other = table.entries.get(key._replace(rows=key.rows + 1))
        return None if other is None or other.plan.implementation == "mosaic" else other

    def check(self, key: Key, implementation: str, config: Mapping[str, Any]) -> None:
        """Raises ValueError for a configuration that a kernel can't multiply the format with."""
        _check_numbers(config)
        format = ProductFormat.of(key.format).weight
        if implementation == "triton":
            _check_tiles(config, format)
        elif reason := why_unsound(WarpgroupConfig(**config), format):
            raise ValueError(reason)

    def suits(self, problem: Problem, plan: Plan) -> bool:
        """Whether a problem can run with a plan of its key on its GPU."""
        if plan.implementation == "triton":
            return limits.why_unsound(plan.config, problem) is None
        if plan.implementation == "mosaic":
            return limits.why_not_warpgroups(problem) is None
        is_plain_product = problem.weight.is_flat and problem.weight.group_size is None
        return plan.implementation != "xla" or is_plain_product


TABLES = ProductTables()


def _check_numbers(config: Mapping[str, Any]) -> None:
    for name, value in config.items():
        if name == "scaling":
            if value not in SCALINGS:
                raise ValueError(f"scaling is {value!r}, expected one of {SCALINGS}")
        elif type(value) is not int or value < 1:
            raise ValueError(f"{name} is {value!r}, expected a positive integer")


def _check_tiles(config: Mapping[str, Any], format: WeightFormat) -> None:
    for name in POWERS_OF_TWO & config.keys():
        if (value := config[name]) & (value - 1):
            raise ValueError(f"{name} is {value}, expected a power of two")
    if config.get("unsplit", 0) % config.get("tile_n", 1):
        raise ValueError(f"unsplit is {config['unsplit']}, expected a multiple of tile_n")
    if format.plane_width % config.get("width", 1):
        raise ValueError(f"width is {config['width']}, expected a divisor of {format.plane_width}")
