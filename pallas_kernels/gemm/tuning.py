"""Which plan a product runs with: from a table of measured ones, else by the rule of thumb."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import itertools
import math
from collections.abc import Hashable, Iterator

from mpjax.kernels import codes as code_kinds
from mpjax.kernels import device
from mpjax.kernels.device import Limits
from mpjax.kernels.formats import WeightFormat
from mpjax.kernels.gemm import tables
from mpjax.kernels.gemm.config import ROWS, GemmConfig, Plan, WarpgroupConfig
from mpjax.kernels.gemm.heuristic import fused_config, heuristic, most_splits, unfused
from mpjax.kernels.gemm.limits import (
    why_not_fused,
    why_not_warpgroups,
    why_unsound,
    widths,
)
from mpjax.kernels.gemm.warpgroups import ranked, warpgroup_config
from mpjax.kernels.quantized_tensor import QuantizedTensor

WARPGROUP_SHARE = 3  # of so many candidates one is for it
_forced: contextvars.ContextVar[Plan | None] = contextvars.ContextVar("forced plan", default=None)


def plan(rows: int, weight: QuantizedTensor) -> Plan:
    """How to multiply x of `rows` rows by a weight: as measured, else by `heuristic`.

    Only looks at shapes, so that it can be called while tracing. Raises tables.TableError for a
    damaged table.
    """
    if (forced := _forced.get()) is not None:
        return forced
    place = tables.key(weight.format, *weight.shape, rows)
    entry = tables.lookup(device.kind(), place)
    if entry is not None:
        return entry.plan
    return heuristic(rows, weight.format, *weight.shape, device.limits())


def runs_by_warpgroups(rows: int, weight: QuantizedTensor) -> bool:
    """Whether bfloat16 x of `rows` rows is multiplied by warpgroups here, by `plan`."""
    if device.why_triton_cannot_run() is not None:
        return False
    reason = why_not_warpgroups(weight.format, weight.shape[1], device.limits())
    return plan(rows, weight).implementation == "mosaic" and reason is None


def configure(rows: int, weight: QuantizedTensor) -> GemmConfig:
    """A configuration of the fused kernel, also where `plan` would choose something else.

    Raises UnsupportedError, with the reason, where the GPU can't multiply the format.
    """
    config = plan(rows, weight).config
    if isinstance(config, GemmConfig):
        return config
    return fused_config(rows, weight.format, *weight.shape, device.limits())


def configure_warpgroups(rows: int, weight: QuantizedTensor) -> WarpgroupConfig:
    """A configuration of the warpgroups' kernel, also where `plan` would choose something else."""
    config = plan(rows, weight).config
    if isinstance(config, WarpgroupConfig):
        return config
    return warpgroup_config(rows, weight.format, *weight.shape, device.limits())


@contextlib.contextmanager
def forced(plan: Plan | None) -> Iterator[None]:
    """Inside, in this thread, `plan` is the answer for every product that is traced.

    None: each has the plan again that it has outside of all `forced`.
    """
    token = _forced.set(plan)
    try:
        yield
    finally:
        _forced.reset(token)


def conditions() -> Hashable:
    """What plans depend on besides shapes: for the key of whoever keeps traces of products."""
    return _forced.get(), tables.reading()


def candidates(
    rows: int, format: WeightFormat, channels: int, outputs: int, limits: Limits, most: int = 40
) -> list[Plan]:
    """The plans worth measuring, all sound: the fused kernels', and what many rows run with.

    Those of the kernel that the rule of thumb chooses come first, nearest to it, and what many rows
    run with comes last.

    rows: a bucket. Nearness counts doublings of a tile's sides, of the outputs of a warp, the
    width and the warps in flight, and stages.
    """
    other = Plan(unfused(format, limits))
    if why_not_fused(format, limits):
        return [other]
    center = fused_config(rows, format, channels, outputs, limits)

    def place(config: GemmConfig) -> tuple[float, ...]:
        tiles = -(-rows // config.tile_m) * -(-outputs // config.tile_n)
        per_warp = config.tile_n / config.warps
        width = config.width or format.plane_width
        logarithms = map(math.log2, (config.tile_m, config.tile_n, per_warp, width))
        return *logarithms, math.log2(tiles * config.splits * config.warps), config.stages

    def distance(config: GemmConfig) -> float:
        moved = sum(abs(a - b) for a, b in zip(place(config), place(center), strict=True))
        return moved + (config.scaling != center.scaling)

    height = max(8, min(256, 2 ** math.ceil(math.log2(rows))))
    space = itertools.product(
        [size for size in (height, height // 2, height // 4) if size >= 8],
        (32, 64, 128, 256),
        [splits for splits in (1, 2, 3, 4, 6, 8) if splits <= most_splits(format, channels)],
        (1, 2, 4, 8),
        (2, 3, 4, 5),
        tables.SCALINGS,
        widths(format),
    )
    configs = {center} | {GemmConfig(*fields) for fields in space}
    if center.unsplit is not None:
        alike = [c for c in configs if (c.tile_m, c.tile_n) == (center.tile_m, center.tile_n)]
        configs |= {dataclasses.replace(c, unsplit=center.unsplit) for c in alike if c.splits > 1}
    sound = [config for config in configs if why_unsound(config, format, limits) is None]
    sound.sort(key=lambda config: (distance(config), repr(config)))
    plans = [Plan("triton", config) for config in sound]
    has_table = code_kinds.of(format).has_table
    if (rows >= ROWS or has_table) and why_not_warpgroups(format, outputs, limits) is None:
        best = ranked(rows, format, channels, outputs, limits)[: most // WARPGROUP_SHARE]
        plans = [*plans[: most - len(best) - 1], *(Plan("mosaic", config) for config in best)]
        rule = heuristic(rows, format, channels, outputs, limits)
        plans.sort(key=lambda plan: plan.implementation != rule.implementation)
    # What many rows run with has no tiles to choose, and is a bound that no product may miss.
    return [*plans[: most - 1], other]
