"""The inputs of the gated delta rule for each token, checked."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from mpjax.kernels.checks import as_arrays, require_floats, require_type, shown

EPSILON = 1e-6  # of the L2 norms of queries and keys


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["query", "key", "value", "decay", "rate"],
    meta_fields=[],
)
@dataclasses.dataclass(frozen=True)
class DeltaInputs:
    """The queries, keys, values and gates of tokens, for `gated_delta_rule`.

    query, key: [batch, tokens, key heads, K], or varlen [tokens, key heads, K]; of any length,
        since both are normalised.
    value: [..., value heads, V]. Each key head serves a group of consecutive value heads.
    decay: [..., value heads], the logarithm of the state's decay factor, 0 or below; or [..., value
        heads, K], one for each key channel (Kimi Delta Attention).
    rate: [..., value heads], β: the part of the difference between a value and the state's value
        for its key that is written, usually between 0 and 1.
    """

    query: Any
    key: Any
    value: Any
    decay: Any
    rate: Any

    def read(self, operation: str) -> DeltaInputs:
        """The inputs as arrays. Raises ValueError for shapes and dtypes that don't fit."""
        names = [field.name for field in dataclasses.fields(self)]
        values = {name: getattr(self, name) for name in names}
        arrays = as_arrays(operation, **values)
        require_floats(operation, **dict(zip(names, arrays, strict=True)))
        found = DeltaInputs(*arrays)
        *tokens, key_heads, _ = found.key.shape if found.key.ndim in (3, 4) else (0, 0, 0)
        *others, heads, _ = found.value.shape if found.value.ndim == found.key.ndim else (0, 1, 0)
        gates = (*tokens, heads)
        is_fitting = (
            found.query.shape == found.key.shape
            and others == tokens
            and key_heads > 0
            and heads % key_heads == 0
            and found.rate.shape == gates
            and found.decay.shape in (gates, (*gates, found.key.shape[-1]))
        )
        if not is_fitting:
            kinds = ", ".join(f"{name} {shown(getattr(found, name))}" for name in names)
            raise ValueError(
                f"{operation}: the inputs are {kinds}: expected query and key [batch, tokens, key "
                "heads, K], or varlen [tokens, key heads, K], value [..., value heads, V] with "
                "whole groups of value heads, decay and rate [..., value heads], or decay [..., "
                "value heads, K]"
            )
        return found

    @property
    def decays_by_channel(self) -> bool:
        """Whether each key channel has a decay."""
        return bool(self.decay.ndim > self.rate.ndim)

    @property
    def state_shape(self) -> tuple[int, int, int]:
        """The shape of a sequence's state: value heads, K and V."""
        return self.value.shape[-2], self.key.shape[-1], self.value.shape[-1]

    def prepared(self) -> DeltaInputs:
        """Float32 inputs with normalised, scaled queries and keys, by key head.

        Returns query, key [..., key heads, K], value [..., key heads, group, V], rate [..., key
        heads, group], and decay [..., key heads, group, 1 or K]. Zero tokens leave a state
        unchanged.
        """
        *places, heads, size = self.key.shape
        decay = self.decay if self.decays_by_channel else self.decay[..., None]
        grouped = (
            x.astype(jnp.float32).reshape(*places, heads, -1, *x.shape[len(places) + 1 :])
            for x in (self.value, decay, self.rate)
        )
        return DeltaInputs(normalized(self.query) * size**-0.5, normalized(self.key), *grouped)


def normalized(x: jax.Array) -> jax.Array:
    """Float32 x / √(Σx² + ε), over the last axis."""
    wide = x.astype(jnp.float32)
    return wide * jax.lax.rsqrt(jnp.sum(wide * wide, -1, keepdims=True) + EPSILON)


def require_inputs(operation: str, inputs: Any) -> DeltaInputs:
    """The inputs, checked by `read`. Raises ValueError for anything else."""
    require_type(f"{operation}: inputs", inputs, DeltaInputs)
    found: DeltaInputs = inputs.read(operation)
    return found
