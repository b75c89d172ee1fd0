"""What mixers with a state of each sequence have in common: tokens may be taken back."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
from flax import nnx

from mpjax.models.layers import Activations
from mpjax.models.state import StepContext


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["state", "inputs"], meta_fields=[]
)
@dataclasses.dataclass(frozen=True)
class Tentative:
    """A state before tokens that may be taken back, and what they are to the recurrence.

    state: of a SequenceState. inputs: as `RecurrentMixer.project` gives them.
    """

    state: tuple[jax.Array, ...]
    inputs: Any


def part(states: Any) -> tuple[Any, Any]:
    """States without what is in their Tentatives beside states, and that: see `join`."""

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
    """What `part` has parted."""

    def joined(x: Any, state: Any) -> Any:
        return Tentative(state, x.inputs) if isinstance(x, Tentative) else state

    return jax.tree.map(joined, rest, states, is_leaf=lambda x: x is None or _is_tentative(x))


def _is_tentative(x: Any) -> bool:
    return isinstance(x, Tentative)


class RecurrentMixer(nnx.Module):
    """A mixer whose state is a SequenceState: projections of each token, and a recurrence of them.

    A state holds all tokens that were read, so none can be taken out of it. After a tentative step
    it stays as it was, beside the projections of the step's tokens; once it is known how many of
    them are kept, the recurrence alone reads these: the state once more, and no weights.
    """

    def project(self, x: Activations, context: StepContext) -> Any:
        """What the recurrence reads of each token: a tree of arrays [batch, tokens, ...]."""
        raise NotImplementedError

    def advance(
        self, inputs: Any, context: StepContext, state: tuple[jax.Array, ...] | None
    ) -> tuple[jax.Array, tuple[jax.Array, ...] | None]:
        """Runs the recurrence: the input of the last map, [..., channels], and the state."""
        raise NotImplementedError

    def mix(
        self, x: Activations, context: StepContext, state: tuple[jax.Array, ...] | None = None
    ) -> tuple[jax.Array, Any]:
        """Everything but the last map, and the state, which is a Tentative in such a step."""
        inputs = self.project(x, context)
        mixed, after = self.advance(inputs, context, state)
        if context.tentative and state is not None:
            return mixed, Tentative(state, inputs)
        return mixed, after

    def settle(self, state: Any, context: StepContext) -> Any:
        """The state with the first tokens of a tentative step, as many as the context counts."""
        assert isinstance(state, Tentative)
        return self.advance(state.inputs, context, state.state)[1]
