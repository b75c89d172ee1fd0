"""The parameters of the operation between the QKV product and attention."""

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
    jax.tree_util.register_dataclass,
    data_fields=["query", "key"],
    meta_fields=["epsilon", "values"],
)
@dataclasses.dataclass(frozen=True)
class HeadNorms:
    """QK-norm: RMSNorms of queries and keys, each over the head dimension (Qwen3).

    epsilon: added to the mean square; a Python number, since kernels are compiled for it (static).
    values: whether values are normalised, too, without a weight (Gemma 4; static).
    """

    query: jax.Array  # [head dim], the norm's weight
    key: jax.Array  # [head dim]
    epsilon: float
    values: bool = False


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["cosines", "sines", "norms"],
    meta_fields=["heads", "transform_queries", "keys_as_values"],
)
@dataclasses.dataclass(frozen=True)
class Rotation:
    """QK-norm, the rotary embedding, and the Hadamard transform of queries.

    cosines, sines: float32 [batch, tokens, head dim / 2], or varlen [tokens, head dim / 2], of the
        angles of each token's position.
    heads: the numbers of query heads and of KV heads (static).
    norms: of queries and keys before the rotation, or None.
    transform_queries: whether queries are transformed like the pages' keys, if the pages' format
        has a Hadamard transform (static). Such queries are for
        `paged_attention(..., transformed=True)`.
    keys_as_values: whether there are no values: they are the keys before norms and rotation
        (static).

    Raises ValueError unless heads are a pair of positive whole numbers. Arrays are checked by the
    operation that takes the rotation (`read`).
    """

    cosines: jax.Array
    sines: jax.Array
    heads: tuple[int, int]
    norms: HeadNorms | None = None
    transform_queries: bool = False
    keys_as_values: bool = False

    def __post_init__(self) -> None:
        # Arrays are not checked here: the leaves of a pytree may be any object.
        for name in ("transform_queries", "keys_as_values"):
            value = getattr(self, name)
            require_type(f"Rotation: {name}", value, bool, np.bool)
            object.__setattr__(self, name, bool(value))
        object.__setattr__(self, "heads", _heads(self.heads))

    @property
    def total(self) -> int:
        """The number of heads that terms have."""
        queries, keys = self.heads
        return queries + keys * (1 if self.keys_as_values else 2)

    def read(self, operation: str) -> Rotation:
        """The rotation with lists and NumPy arrays converted to JAX arrays.

        Raises ValueError, which names the operation, for leaves that are not arrays of numbers.
        """
        cosines, sines = as_arrays(operation, cosines=self.cosines, sines=self.sines)
        require_floats(operation, cosines=cosines, sines=sines)
        norms = None if self.norms is None else _norms(f"{operation}: norms", self.norms)
        return dataclasses.replace(self, cosines=cosines, sines=sines, norms=norms)

    def map_angles(self, function: Callable[[jax.Array], jax.Array]) -> Rotation:
        """The rotation with a function applied to its cosines and its sines."""
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
    require_type(f"{name}: values", norms.values, bool, np.bool)
    epsilon = norm_epsilon(f"{name}: epsilon", norms.epsilon)
    return HeadNorms(query, key, epsilon, bool(norms.values))
