"""Jitted programs of an engine, and calls of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from mpjax.engine.choosing import choose, forward
from mpjax.engine.controlled import begin_control
from mpjax.engine.histories import begin_history
from mpjax.engine.programs import Drawn, clear, copy, decode, extend
from mpjax.engine.speculating import speculate
from mpjax.engine.state import committed
from mpjax.generation.speculation.proposer import Proposer
from mpjax.generation.state import State
from mpjax.models.low_rank import Adapted


class Structure:
    """The structure of a model's pytree, with a cached hash and a fast comparison with itself."""

    def __init__(self, structure: Any) -> None:
        self.structure, self._hash = structure, hash(structure)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Structure):
            return NotImplemented
        return self is other or (
            self._hash == other._hash and bool(self.structure == other.structure)
        )

    def __hash__(self) -> int:
        return self._hash


def flat(*models: Any) -> tuple[Structure, list[jax.Array]]:
    """The static pytree structure of several models, and their arrays."""
    leaves, structure = jax.tree.flatten(models)
    return Structure(structure), committed(leaves)


def jitted(function: Callable[..., Any], *, in_turn: bool) -> Any:
    """Jits a program as a function of (structure, arrays of the models, state, ...).

    in_turn: whether programmatic dependent launch is disabled (`decode_program`).
    """

    def run(
        structure: Structure, leaves: list[jax.Array], *rest: Any, before: Any = None, **how: Any
    ) -> Any:
        arrays: list[Any] = leaves or [None] * structure.structure.num_leaves
        models = jax.tree.unflatten(structure.structure, arrays)
        joined = (each.joined if isinstance(each, Adapted) else each for each in models)
        return function(*joined, *rest, **how)

    run.__name__ = run.__qualname__ = function.__name__
    return jax.jit(
        run,
        static_argnums=0,
        static_argnames=(
            *("scored", "steps", "most", "greedy"),
            *("waits", "width", "vocabulary", "advances"),
        ),
        donate_argnums=2,
        donate_argnames="before",
        keep_unused=function in (forward, choose),  # `before` only gives memory to results
        compiler_options={"xla_gpu_enable_pdl": False} if in_turn else None,
    )


def begin(proposer: Proposer, state: State, *row: Any) -> State:
    """The state with a new row's tokens in the history of its slot; see `begin_history`."""
    assert state.speculation is not None
    histories = begin_history(proposer, state.speculation, *row)
    return dataclasses.replace(state, speculation=histories)


# Engines of equal sizes over models of equal structure share compiled programs.
JITTED = {
    (function, in_turn): jitted(function, in_turn=in_turn)
    for function in (extend, decode, speculate, forward, choose, begin, begin_control, clear, copy)
    for in_turn in (False, True)
}


def count_programs() -> int:
    """The number of programs compiled so far, in all engines of the process."""
    return sum(function._cache_size() for function in JITTED.values())


class Call(NamedTuple):
    """A call of a jitted function.

    name: the key in `Programs.used`. modules: the structure and arrays that `flat` returns for the
    models passed to `run`, or no arrays for a program that needs none. arguments: positional
    arguments after the state. needs: which large parts of the state it takes. reuses: whether its
    results get the memory of its last run's results, which have been read by then.
    """

    name: tuple[Any, ...]
    run: Any
    modules: tuple[Any, ...]
    arguments: tuple[Any, ...]
    how: dict[str, Any]
    needs: frozenset[str] = frozenset({"layers", "processors"})
    reuses: bool = False

    def own(self, state: State) -> State:
        """The part of a state that the program needs: a launch takes longer with more arrays."""
        if "layers" not in self.needs:
            state = dataclasses.replace(state, cache=dataclasses.replace(state.cache, layers=()))
        return state if "processors" in self.needs else dataclasses.replace(state, processors=())

    def whole(self, state: State, before: State) -> State:
        """The whole state after the program. state: that it has returned. before: the whole one."""
        if "layers" not in self.needs:
            cache = dataclasses.replace(state.cache, layers=before.cache.layers)
            state = dataclasses.replace(state, cache=cache)
        if "processors" not in self.needs:
            state = dataclasses.replace(state, processors=before.processors)
        return state


def shapes_of(call: Call, state: State) -> Any:
    """The shapes and dtypes of a call's results."""
    return call.run.eval_shape(*call.modules, call.own(state), *call.arguments, **call.how)


def reused(results: Any) -> Any:
    """The results of `forward` or `choose` whose memory the next run of the program may reuse."""
    if isinstance(results, Drawn):
        return dataclasses.replace(results, speculated=None, captured=None)
    return results[0]
