"""The rule for tiles and programs of attention over latents."""

from __future__ import annotations

from typing import NamedTuple

from mpjax.kernels.attention.plans import OTHER_BYTES, AttentionConfig
from mpjax.kernels.device import Limits

# Rows of a tile: more would leave no registers for the sums. Tiles of other heads of a token load
# the same latents at the same time, from the L2 cache.
LEAST_ROWS, MOST_ROWS = 8, 16
KEYS = 32  # of a tile
WARPS = 4
MOST_AHEAD = 4  # tiles that a program loads ahead
# Programs per multiprocessor; only one, which loads further ahead, if two would have fewer than
# FEW_TILES tiles each: joining twice as many partials costs more than it gains.
RESIDENT, FEW_TILES = 2, 16


class LatentProblem(NamedTuple):
    """Attention of new tokens over the latents of a batch.

    batch: number of sequences. rows: pairs of a new token and a query head, of one sequence, or of
    all sequences together if varlen. tokens: the capacity of each sequence. token_bytes: the bytes
    that a program loads for a token.
    """

    batch: int
    rows: int
    tokens: int
    token_bytes: int


def plan_by_rule(problem: LatentProblem, limits: Limits) -> AttentionConfig:
    """The configuration for a problem: as many programs per sequence as run at once."""
    rows = min(MOST_ROWS, max(LEAST_ROWS, 1 << (problem.rows - 1).bit_length()))
    programs = problem.batch * -(-problem.rows // rows)
    tiles = -(-problem.tokens // KEYS)
    resident = RESIDENT
    if tiles * programs < FEW_TILES * resident * limits.multiprocessors:
        resident = 1
    room = (limits.shared_memory - OTHER_BYTES) // resident
    ahead = max(1, min(MOST_AHEAD, room // (KEYS * problem.token_bytes)))
    splits = max(1, min(tiles, resident * limits.multiprocessors // programs))
    return AttentionConfig(rows, KEYS, splits, WARPS, ahead + 1)
