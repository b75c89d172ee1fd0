"""The rule for tiles and programs of attention over latents."""

from __future__ import annotations

from typing import NamedTuple

from mpjax.kernels.attention.plans import OTHER_BYTES, AttentionConfig
from mpjax.kernels.device import Limits

LEAST_ROWS, MOST_ROWS = 8, 32  # of a tile: more would leave no registers beside the sums
KEYS = 32  # of a tile
RESIDENT_ROWS = 16  # up to this number, two programs are resident on a multiprocessor
MOST_AHEAD = 4  # tiles that a program loads ahead


class LatentProblem(NamedTuple):
    """Attention of new tokens over the latents of a batch.

    batch: number of sequences. rows: pairs of a new token and a query head, of one sequence, or of
    all sequences together if varlen. tokens: the capacity of each sequence. token_bytes: of a
    token's latent, rotary part and scales.
    """

    batch: int
    rows: int
    tokens: int
    token_bytes: int


def plan_by_rule(problem: LatentProblem, limits: Limits) -> AttentionConfig:
    """The configuration for a problem: as many programs per sequence as run at once."""
    rows = min(MOST_ROWS, max(LEAST_ROWS, 1 << (problem.rows - 1).bit_length()))
    resident = 2 if rows <= RESIDENT_ROWS else 1
    keys = KEYS
    room = (limits.shared_memory - OTHER_BYTES) // resident
    ahead = max(1, min(MOST_AHEAD, room // (keys * problem.token_bytes)))
    row_tiles = -(-problem.rows // rows)
    programs = problem.batch * row_tiles
    tiles = -(-problem.tokens // keys)
    splits = max(1, min(tiles, resident * limits.multiprocessors // programs))
    warps = 4 if rows <= RESIDENT_ROWS else 8
    return AttentionConfig(rows, keys, splits, warps, ahead + 1)
