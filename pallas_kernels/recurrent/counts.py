"""Checks of the counts of real tokens, for the operations of this folder."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from mpjax.kernels.checks import are_between, is_known, optional_array, shown


def read_counts(
    operation: str, counts: jax.Array | None, shape: tuple[int, ...]
) -> jax.Array | None:
    """Counts as int32 [batch]; None for all tokens of each sequence.

    shape: [batch, tokens] of padded tokens, or [tokens] of varlen tokens, which need counts.
    Raises ValueError for another shape or dtype, and for known counts out of range.
    """
    counts, is_varlen = optional_array(f"{operation}: counts", counts), len(shape) == 1
    if counts is None:
        if is_varlen:
            raise ValueError(f"{operation}: counts is None: expected those of varlen x")
        return None
    tokens = shape[-1]
    is_whole = counts.ndim == 1 and jnp.issubdtype(counts.dtype, jnp.integer)
    if not is_whole or (not is_varlen and len(counts) != shape[0]) or len(counts) == 0:
        raise ValueError(
            f"{operation}: counts is {shown(counts)}: expected int32 [batch] for tokens of shape "
            f"{shape}"
        )
    too_many = is_varlen and is_known(counts) and int(jnp.asarray(counts).sum()) > tokens
    if too_many or not are_between(counts, 0, tokens):
        raise ValueError(
            f"{operation}: counts are {counts.tolist()}: expected 0 to {tokens}, the tokens of x"
            + (", and no more in all" if is_varlen else "")
        )
    return jnp.asarray(counts, jnp.int32)
