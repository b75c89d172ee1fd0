"""Base class of mixers with a fixed-size state for each sequence, and removal of tokens."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from mpjax.kernels.invariance import is_batch_invariant
from mpjax.models.layers import Activations
from mpjax.models.state import SequenceState, StepContext


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["state", "inputs"], meta_fields=[]
)
@dataclasses.dataclass(frozen=True)
class Tentative:
    """A state before tokens that may be removed, and the recurrence's inputs of these tokens.

    state: of a SequenceState. inputs: the result of `RecurrentMixer.project`.
    """

    state: tuple[jax.Array, ...]
    inputs: Any


def part(states: Any) -> tuple[Any, Any]:
    """Separates a tree of states into plain states and the inputs of Tentatives; see `join`."""

    def only(x: Any, *, state: bool) -> Any:
        if not isinstance(x, Tentative):
            return x if state else None
        return x.state if state else Tentative((), x.inputs)

    first, rest = (
        jax.tree.map(functools.partial(only, state=which), states, is_leaf=_is_tentative)
        for which in (True, False)
    )
    return first, rest


def join(states: Any, rest: Any) -> Any:
    """Undoes `part`: one tree of states, with Tentatives."""

    def joined(x: Any, state: Any) -> Any:
        return Tentative(state, x.inputs) if isinstance(x, Tentative) else state

    return jax.tree.map(joined, rest, states, is_leaf=lambda x: x is None or _is_tentative(x))


def _is_tentative(x: Any) -> bool:
    return isinstance(x, Tentative)


class RecurrentMixer(nnx.Module):
    """A mixer whose state is a SequenceState: projections of each token, and a recurrence.

    No token can be removed from an updated state. So a tentative step returns the state as it was,
    with the projections of the step's tokens. Once it is known how many tokens are kept, only the
    recurrence runs again, which needs no weights of linear maps.

    kept: the kind of the state.
    """

    kept: SequenceState

    def project(self, x: Activations, context: StepContext) -> Any:
        """The recurrence's inputs of each token: a tree of arrays [batch, tokens, ...]."""
        raise NotImplementedError

    def advance(
        self, inputs: Any, context: StepContext, state: tuple[jax.Array, ...] | None
    ) -> tuple[jax.Array, tuple[jax.Array, ...] | None]:
        """Runs the recurrence: the input of the last map, [..., channels], and the state."""
        raise NotImplementedError

    def mix(
        self, x: Activations, context: StepContext, state: tuple[jax.Array, ...] | None = None
    ) -> tuple[jax.Array, Any]:
        """The mixer without its last map, and the state: a Tentative if the step is tentative."""
        inputs = self.project(x, context)
        if state is None and is_batch_invariant():
            # Without a cache, states begin with zeros, and the rest is computed as with a cache.
            rows = jax.tree.leaves(inputs)[0] if context.counts is None else context.counts
            shapes, dtype = self.kept.shapes, self.kept.dtype
            zeros = tuple(jnp.zeros((len(rows), *shape), dtype) for shape in shapes)
            return self.advance(inputs, context, zeros)[0], None
        mixed, after = self.advance(inputs, context, state)
        if context.tentative and state is not None:
            return mixed, Tentative(state, inputs)
        return mixed, after

    def settle(self, state: Any, context: StepContext) -> Any:
        """The state with the first `context.counts` tokens of a tentative step."""
        assert isinstance(state, Tentative)
        return self.advance(state.inputs, context, state.state)[1]
