"""The rule for tiles and programs of attention over latents."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

from mpjax.kernels.attention.plans import OTHER_BYTES, AttentionConfig
from mpjax.kernels.device import Limits

# Rows of a tile: more would leave no registers for the sums. Tiles of other heads of a token load
# the same latents at the same time, from the L2 cache.
LEAST_ROWS, MOST_ROWS = 8, 16
# Tokens of a tile. In 4 bits twice as many are loaded in the same time, and the work of a tile that
# doesn't depend on their number counts more.
KEYS, KEYS_OF_4_BITS = 32, 64
WARPS = 4
MOST_AHEAD = 4  # tiles that a program loads ahead
RESIDENT = 2  # programs on a multiprocessor: one multiplies while the other waits for its tile
SPLITS = 8  # of a sequence, in batch-invariant calls


class LatentProblem(NamedTuple):
    """Attention of new tokens over the latents of a batch.

    batch: number of sequences. rows: pairs of a new token and a query head, of one sequence, or of
    all sequences together if varlen. tokens: the capacity of each sequence. token_bytes: the bytes
    that a program loads for a token. bits: of a latent's channels.
    """

    batch: int
    rows: int
    tokens: int
    token_bytes: int
    bits: int = 16


def plan_by_rule(problem: LatentProblem, limits: Limits) -> AttentionConfig:
    """The configuration for a problem: as many programs per sequence as run at once."""
    rows = min(MOST_ROWS, max(LEAST_ROWS, 1 << (problem.rows - 1).bit_length()))
    programs = problem.batch * -(-problem.rows // rows)
    keys = KEYS_OF_4_BITS if problem.bits == 4 else KEYS
    room = (limits.shared_memory - OTHER_BYTES) // RESIDENT
    ahead = max(1, min(MOST_AHEAD, room // (keys * problem.token_bytes)))
    most = RESIDENT * limits.multiprocessors // programs
    splits = max(1, min(-(-problem.tokens // keys), most))
    return AttentionConfig(rows, keys, splits, WARPS, ahead + 1)


def invariant_plan(problem: LatentProblem, limits: Limits) -> AttentionConfig:
    """The batch-invariant configuration, which depends on the pages' format and channels alone."""
    usual = plan_by_rule(problem, limits)
    return dataclasses.replace(usual, tile_rows=MOST_ROWS, splits=SPLITS)
