"""The rule for batch-invariant attention: one tile and one number of splits for every problem.

A row is computed by itself within its tile, and a sequence's tiles of keys are dealt to its splits
in turn. So with one size of tiles, a token's sums depend on its position alone.
"""

from __future__ import annotations

import dataclasses

from mpjax.kernels import device
from mpjax.kernels.attention.plans.configuration import NARROW_ROWS, AttentionConfig, tile_memory
from mpjax.kernels.attention.plans.problem import Problem
from mpjax.kernels.attention.plans.split_rule import SMALL_KEYS, largest_tile
from mpjax.kernels.plans.plan import Plan

# Enough for one sequence with 8 KV heads to keep an H200 busy. More would take more memory: of
# a long prompt, the outputs of each split are in float32.
SPLITS = 8
STAGES = 3, 2  # to try in turn


def invariant_plan(problem: Problem) -> Plan:
    """The batch-invariant plan of a problem; it depends on heads and KV format alone.

    Raises UnsupportedError for a KV format with a residual.
    """
    if problem.residual:
        raise device.UnsupportedError(
            f"no batch-invariant attention over {problem.cache.format}: it keeps a residual"
        )
    wide = dataclasses.replace(problem.cache, page_size=SMALL_KEYS)
    tile = largest_tile(dataclasses.replace(problem, rows=NARROW_ROWS, cache=wide))
    memory = tile_memory(problem, NARROW_ROWS) // (tile.keys * problem.token_bytes)
    stages = next(stages for stages in STAGES if stages - 1 <= memory or stages == STAGES[-1])
    return Plan("triton", AttentionConfig(NARROW_ROWS, tile.keys, SPLITS, tile.warps, stages))
