"""The measured plans of products: what a plan is measured for, and which plans there can be."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from mpjax.kernels.formats import WeightFormat
from mpjax.kernels.gemm.plans.configuration import (
    ROWS,
    SCALINGS,
    TritonConfig,
    WarpgroupConfig,
)
from mpjax.kernels.gemm.plans.problem import Problem
from mpjax.kernels.gemm.plans.warpgroup_rule import why_unsound
from mpjax.kernels.plans.plan import Entry
from mpjax.kernels.plans.tables import Table, Tables
from mpjax.kernels.product_format import ProductFormat

# A plan measured for so many rows serves all numbers of rows down to the next smaller one. Of few
# rows, multiples of ROWS have buckets of their own: others, above ROWS, are padded for warpgroups.
BUCKETS = (7, 8, 15, 16, 31, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
POWERS_OF_TWO = {"tile_m", "tile_n", "warps", "width"}  # of Triton's tiles


class Key(NamedTuple):
    """What a plan is for: a format's text, the weight's shape [K, N], and a bucket of rows."""

    format: str
    channels: int
    outputs: int
    rows: int


def bucket(rows: int) -> int:
    """The smallest of BUCKETS that holds `rows`; above the last, the last."""
    size = next((size for size in BUCKETS if rows <= size), BUCKETS[-1])
    return size + 1 if rows % ROWS == 0 and size % ROWS else size


class ProductTables(Tables[Problem]):
    """Plans by format, shape such as `4096x24576` (K × N) and bucket of rows."""

    operation = "gemm"
    levels = 3
    configs: Mapping[str, type | None] = {
        "triton": TritonConfig,
        "mosaic": WarpgroupConfig,
        "dequantize": None,
        "xla": None,
    }

    def key_of(self, problem: Problem) -> Key:
        """The key of a problem: its rows count as those of their bucket."""
        rows = bucket(problem.rows)
        return Key(str(problem.format), problem.channels, problem.outputs, rows)

    def names(self, key: Key) -> tuple[str, ...]:
        """Such as `uint4:g128`, `4096x24576` and `64`."""
        return key.format, f"{key.channels}x{key.outputs}", str(key.rows)

    def key(self, names: tuple[str, ...]) -> Key:
        """The inverse of `names`; raises ValueError for another text than a table has."""
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
        """The entry of a key.

        Without one, that of the next multiple of ROWS will do, but for one of warpgroups.
        """
        if key in table.entries or not key.rows % ROWS:
            return table.entries.get(key)
        other = table.entries.get(key._replace(rows=key.rows + 1))
        return None if other is None or other.plan.implementation == "mosaic" else other

    def check(self, key: Key, implementation: str, config: Mapping[str, Any]) -> None:
        """Raises ValueError for tiles that a kernel of the format can't have."""
        _check_numbers(config)
        format = ProductFormat.of(key.format).weight
        if implementation == "triton":
            _check_tiles(config, format)
        elif reason := why_unsound(WarpgroupConfig(**config), format):
            raise ValueError(reason)


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
