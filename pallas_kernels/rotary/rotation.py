"""What becomes of queries and keys between their projections and attention."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from mpjax.kernels.checks import (
    as_arrays,
    norm_epsilon,
    require_floats,
    require_type,
    shown,
    whole_number,
)


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["query", "key"], meta_fields=["epsilon"]
)
@dataclasses.dataclass(frozen=True)
class HeadNorms:
    """RMS norms over each query's and key's head dimension (Qwen3).

    epsilon: a Python number, which kernels are compiled for; under `jit` it is part of the type.
    """

    query: jax.Array  # [head dim]
    key: jax.Array  # [head dim]
    epsilon: float


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["cosines", "sines", "norms"],
    meta_fields=["heads", "transform_queries"],
)
@dataclasses.dataclass(frozen=True)
class Rotation:
    """Head norms, the rotary embedding, and the Hadamard transform of queries.

    cosines, sines: float32 [batch, tokens, head dim / 2] of the angles of each position, or varlen
        [tokens, head dim / 2].
    heads: query heads and KV heads (static).
    norms: of queries and keys, each [head dim], before the rotation, or None.
    transform_queries: whether queries, too, go through the Hadamard transform of the pages' keys,
        if theirs is a format with one (static): for `paged_attention(..., transformed=True)`, which
        then has nothing left to do.

    Raises ValueError for heads that are no pair of numbers. What else doesn't fit is refused by the
    operation.
    """

    cosines: jax.Array
    sines: jax.Array
    heads: tuple[int, int]
    norms: HeadNorms | None = None
    transform_queries: bool = False

    def __post_init__(self) -> None:
        # Arrays are not looked at here: a pytree's leaves may be anything.
        require_type("Rotation: transform_queries", self.transform_queries, bool, np.bool)
        object.__setattr__(self, "transform_queries", bool(self.transform_queries))
        object.__setattr__(self, "heads", _heads(self.heads))

    def read(self, operation: str) -> Rotation:
        """The rotation with arrays. Raises ValueError, which names the operation, for others."""
        cosines, sines = as_arrays(operation, cosines=self.cosines, sines=self.sines)
        require_floats(operation, cosines=cosines, sines=sines)
        norms = None if self.norms is None else _norms(f"{operation}: norms", self.norms)
        return dataclasses.replace(self, cosines=cosines, sines=sines, norms=norms)

    def map_angles(self, function: Callable[[jax.Array], jax.Array]) -> Rotation:
        """The rotation with a function of its cosines and of its sines in their place."""
        cosines, sines = function(self.cosines), function(self.sines)
        return dataclasses.replace(self, cosines=cosines, sines=sines)


def _heads(heads: Any) -> tuple[int, int]:
    try:
        queries, keys = heads
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"Rotation: heads is {shown(heads)}: expected a pair, query heads and KV heads"
        ) from error
    return (
        whole_number("Rotation: query heads", queries),
        whole_number("Rotation: KV heads", keys),
    )


def _norms(name: str, norms: Any) -> HeadNorms:
    require_type(name, norms, HeadNorms, hint=", or None")
    query, key = as_arrays(name, query=norms.query, key=norms.key)
    return HeadNorms(query, key, norm_epsilon(f"{name}: epsilon", norms.epsilon))
