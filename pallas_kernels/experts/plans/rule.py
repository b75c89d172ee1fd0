"""The rule: the plan of a grouped product without a measured plan."""

from __future__ import annotations

from mpjax.kernels.device import UnsupportedError
from mpjax.kernels.experts.plans.configuration import (
    PLAIN_CHANNELS,
    ExpertsConfig,
    ExpertsWarpgroupConfig,
    Tiling,
)
from mpjax.kernels.experts.plans.problem import Problem
from mpjax.kernels.experts.plans.warpgroup_rule import ranked, suits_warpgroups
from mpjax.kernels.gemm.plans import invariant_plan as dense_plan
from mpjax.kernels.gemm.plans import triton_by_rule
from mpjax.kernels.plans.plan import Plan

# The constants here follow from counts, not from measured times. `mpjax tune --experts` measures
# the times of a GPU: its table then has tile_m and the tiling instead.
ROWS = (8, 16, 32, 64, 128)  # of a tile
# A tile has room for this multiple of the mean number of an expert's tokens, since numbers differ.
# An expert with more gets another tile, which loads its matrix again, mostly from the L2 cache.
ROOM = 1.25
# Up to this share of the experts, each pair has its own tile. Of p pairs with E random experts,
# each shares its expert with (p − 1) / E others on average: less than one pair in four with any.
PAIRS_OF_EXPERTS = 0.25
# The most comparisons of pairs with experts for the counting kernel. Each of its programs makes
# them all, 16,384 at a time, in a third of a microsecond or more: for 4096 pairs and 128 experts
# that is 32 steps. That time grows with the pairs, while a sort's, some 45 µs, hardly does; a table
# has the tiling that was faster on its GPU.
COUNTED_COMPARISONS = 2**19


def plan_by_rule(problem: Problem, *, warpgroups: bool = True) -> Plan:
    """The rule's plan for any problem.

    warpgroups: whether it may choose the warpgroup kernel.
    """
    if warpgroups and suits_warpgroups(problem):
        return Plan("mosaic", warpgroups_by_rule(problem))
    try:
        return Plan("triton", config_by_rule(problem))
    except UnsupportedError:  # the GPU can't multiply the format at all
        return Plan("reference")


def invariant_plan(problem: Problem) -> Plan:
    """The batch-invariant plan of a problem: Triton's kernel without split-K.

    Then a gate is always computed in the kernel. As for dense products, the rows of a tile may
    vary. Raises UnsupportedError, with the reason, if the GPU can't multiply the format.
    """
    rows, tiling = _rows(problem), tiling_of(problem)
    if not problem.format.weight.is_packed:
        rows = min(rows, ROWS[-2])  # tiles of as many outputs and warps for all numbers of rows
        return Plan("triton", ExpertsConfig(rows, 64, 1, 4, 3, tiling=tiling))
    found = dense_plan(problem.product(rows)).config
    kept = found.scaling, found.width
    return Plan(
        "triton",
        ExpertsConfig(found.tile_m, 64, 1, 4, found.stages, *kept, tiling=tiling),
    )


def warpgroups_by_rule(problem: Problem) -> ExpertsWarpgroupConfig:
    """The rule's configuration of the warpgroup kernel, for a problem that it can multiply."""
    return ranked(problem, _tiling_of_shared(problem))[0]


def config_by_rule(problem: Problem) -> ExpertsConfig:
    """The rule's configuration of Triton's kernel. Raises UnsupportedError, with the reason."""
    rows = _rows(problem)
    if not problem.format.weight.is_packed:
        return _plain(problem, rows)
    product = problem.product(rows)
    config = triton_by_rule(product)
    # The kernel can apply a gate only to whole sums; otherwise a separate kernel does. So K is not
    # split if there is a tile for each multiprocessor.
    tiles = product.outputs // config.tile_n
    is_whole = problem.gated and tiles >= problem.limits.multiprocessors
    # A dense product splits only the tiles of channels after `unsplit`, which don't fill the GPU.
    # A grouped product would split all tiles, and write and load many float32 terms.
    is_whole |= config.unsplit is not None
    return ExpertsConfig(
        config.tile_m,
        config.tile_n,
        1 if is_whole else config.splits,
        config.warps,
        config.stages,
        config.scaling,
        config.width,
        tiling=tiling_of(problem),
    )


def tiling_of(problem: Problem) -> Tiling:
    """How tiles are found: without sorting for few pairs."""
    if problem.tokens == 1 or problem.pairs <= PAIRS_OF_EXPERTS * problem.experts:
        return "pairs"
    return _tiling_of_shared(problem)


def _tiling_of_shared(problem: Problem) -> Tiling:
    """How tiles with several pairs are found."""
    is_quick = problem.pairs * problem.experts <= COUNTED_COMPARISONS
    return "counted" if is_quick else "sorted"


def _rows(problem: Problem) -> int:
    wanted = ROOM * problem.own_pairs / problem.hit
    return next((rows for rows in ROWS if rows >= wanted), ROWS[-1])


def _plain(problem: Problem, rows: int) -> ExpertsConfig:
    """The configuration for plain weights."""
    outputs = 128 if rows >= 64 else 64
    tiles = max(problem.hit, -(-problem.own_pairs // rows)) * -(-problem.outputs // outputs)
    steps = -(-problem.channels // PLAIN_CHANNELS)
    splits = max(1, min(2 * problem.limits.multiprocessors // tiles, steps // 4, 8))
    return ExpertsConfig(
        rows, outputs, splits, outputs // 16, 4 if rows <= 32 else 3, tiling=tiling_of(problem)
    )
