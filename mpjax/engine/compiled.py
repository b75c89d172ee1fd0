"""The jitted programs of an engine, and the sizes to which their arguments are padded."""

from __future__ import annotations

import concurrent.futures
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np

from mpjax.decoding import has_warpgroups
from mpjax.engine import filling
from mpjax.engine.pages import NOWHERE
from mpjax.engine.planner import NOBODY, Sizes, middle_chunk, scored_chunk, small_chunk
from mpjax.engine.programs import Drawn, PromptScores, Reading, Stepping, clear, decode, extend
from mpjax.engine.state import EngineState
from mpjax.kernels import device
from mpjax.models import Decoder

FEW_ROWS = 4  # decoding fewer rows takes as long, but for a single one


class _Structure:
    """The structure of a model's pytree, which is compared quickly with itself."""

    def __init__(self, structure: Any) -> None:
        self.structure, self._hash = structure, hash(structure)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Structure):
            return NotImplemented
        return self is other or (
            self._hash == other._hash and bool(self.structure == other.structure)
        )

    def __hash__(self) -> int:
        return self._hash


def _jit(function: Callable[..., Any], *, in_turn: bool) -> Any:
    """A program as a jitted function of a model's structure and arrays.

    in_turn: whether each kernel waits for the end of the one before (`decode_program`).
    """

    def run(structure: _Structure, leaves: list[jax.Array], *rest: Any, **how: Any) -> Any:
        return function(jax.tree.unflatten(structure.structure, leaves), *rest, **how)

    run.__name__ = run.__qualname__ = function.__name__
    return jax.jit(
        run,
        static_argnums=0,
        static_argnames=("scored", "steps", "greedy", "waits"),
        donate_argnums=2,
        compiler_options={"xla_gpu_enable_pdl": False} if in_turn else None,
    )


# Engines over models of one structure, with equal sizes, share what is compiled.
_JITTED = {
    (function, in_turn): _jit(function, in_turn=in_turn)
    for function in (extend, decode)
    for in_turn in (False, True)
}
_jit_clear = jax.jit(clear, donate_argnums=0, static_argnums=3)


def count() -> int:
    """The number of programs that were compiled so far, of all engines."""
    return sum(function._cache_size() for function in (*_JITTED.values(), _jit_clear))


class _Call(NamedTuple):
    """A call of a jitted function, as `Programs.used` names it. arguments: with a state."""

    run: Any
    arguments: Callable[[EngineState], tuple[Any, ...]]
    how: dict[str, Any]
    name: tuple[Any, ...]


class Programs:
    """The jitted programs of one model, with the sizes to which their arguments are padded.

    limits: the sizes of the engine.

    Rows decode `steps` tokens in a program if all are greedy and nobody waits, and else one. The
    sizes are few: with those for scores and for clearing there are at most 15 programs.
    """

    def __init__(self, model: Decoder, limits: Sizes) -> None:
        chunk, slots, steps = limits.chunk, limits.slots, limits.steps
        self._waits, self._pieces = not device.on_gpu(), limits.sequences
        self.scored_size = scored_chunk(chunk)
        small, middle = small_chunk(chunk), middle_chunk(chunk)
        # By whether all rows are greedy, and whether there are places for rows that ride along.
        # These programs read a middle chunk. Where not all rows are greedy, places may be empty.
        self.reading_sizes = {
            (True, False): sorted({small, middle, chunk}),
            (False, False): sorted({middle, chunk}),
        }
        if limits.rides:
            self.reading_sizes = {
                (True, False): sorted({small, chunk}),
                (True, True): [middle],
                (False, True): sorted({middle, chunk}),
            }
        few = sorted({-(-slots // 4), slots})
        self.rider_sizes = {True: [0, *few], False: [slots]} if limits.rides else {}
        parts = {-(-slots // 8), -(-slots // 2), slots}
        # By whether all rows are greedy, and the number of steps.
        self.decoding_sizes = {
            (True, steps): sorted({1, min(FEW_ROWS, slots), *(n for n in parts if n > FEW_ROWS)}),
            (False, 1): sorted({min(2 * FEW_ROWS, slots), slots}),
        }
        if not limits.rides:
            self.decoding_sizes.setdefault((True, 1), [slots])
        self.used: set[tuple[Any, ...]] = set()  # what tells compiled programs apart
        # A model has many modules. Its arrays alone are quickly passed to a program.
        self._leaves, structure = jax.tree.flatten(model)
        self._structure = _Structure(structure)
        self._mesh = model.mesh
        self._is_in_turn = functools.cache(functools.partial(has_warpgroups, model))

    def compile(self, state: EngineState, *, greedy_only: bool) -> EngineState:
        """Compiles all programs, several at a time, and runs each without rows; see Engine.compile.

        The state is donated; the one that is returned has the same rows and pages.
        """
        calls = [*self._calls(state, greedy_only=greedy_only)]
        lowered = [run.lower(*args(state), **how) for run, args, how, _ in calls]
        with concurrent.futures.ThreadPoolExecutor() as pool:
            [*pool.map(lambda each: each.compile(), lowered)]
        for run, args, how, name in calls * 2:  # the second run of a program records its launches
            found = run(*args(state), **how)
            state = found if isinstance(found, EngineState) else found[0]
            self.used.add(name)
        return state

    def _calls(self, state: EngineState, *, greedy_only: bool) -> Iterator[_Call]:
        """All calls that there are, without rows."""
        slots, entries = state.tables.shape
        size = {"slots": slots, "entries": entries}

        def stepping(rows: int) -> Stepping | None:
            return filling.stepping(NOBODY, rows=rows, **size) if rows else None

        def reading(tokens: int, rows: int, *, greedy: bool, scored: bool = False) -> _Call:
            read = filling.reading([], tokens=tokens, rows=self._pieces, **size)
            how, riders = {"greedy": greedy, "scored": scored}, stepping(rows)
            run, name = _JITTED[extend, self._is_in_turn(tokens + rows)], (extend, tokens, rows)
            return _Call(run, self._with_model(read, riders), how, (*name, greedy, scored))

        for (greedy, rides), sizes in self.reading_sizes.items():
            if greedy or not greedy_only:
                places = [n for n in self.rider_sizes[greedy] if n] if rides else [0]
                for tokens, rows in itertools.product(sizes, places):
                    yield reading(tokens, rows, greedy=greedy)
        for (greedy, steps), sizes in self.decoding_sizes.items():
            if greedy or not greedy_only:
                for rows in sizes:
                    how = {"steps": steps, "greedy": greedy, "waits": self._waits}
                    run, name = _JITTED[decode, self._is_in_turn(rows)], (decode, rows)
                    step = self._with_model(stepping(rows))
                    yield _Call(run, step, how, (*name, steps, greedy))
        if not greedy_only:
            yield reading(self.scored_size, 0, greedy=False, scored=True)
            pages, mesh = np.full(entries, NOWHERE, np.int32), self._mesh
            slot = np.int32(slots)  # which no row has
            yield _Call(_jit_clear, lambda state: (state, pages, slot, mesh), {}, (clear,))

    def _with_model(self, *arguments: Any) -> Callable[[EngineState], tuple[Any, ...]]:
        return lambda state: (self._structure, self._leaves, state, *arguments)

    def extend(
        self,
        state: EngineState,
        reading: Reading,
        riders: Stepping | None = None,
        *,
        greedy: bool,
        scored: bool,
    ) -> tuple[EngineState, Drawn, PromptScores | None]:
        """Runs `extend`; the state is donated."""
        tokens, rows = len(reading.tokens), 0 if riders is None else len(riders.slots)
        self.used.add((extend, tokens, rows, greedy, scored))
        run = _JITTED[extend, self._is_in_turn(tokens + rows)]
        options = {"greedy": greedy, "scored": scored}
        return run(self._structure, self._leaves, state, reading, riders, **options)

    def decode(
        self, state: EngineState, stepping: Stepping, *, steps: int, greedy: bool
    ) -> tuple[EngineState, Drawn]:
        """Runs `decode`; the state is donated."""
        rows = len(stepping.slots)
        self.used.add((decode, rows, steps, greedy))
        options = {"steps": steps, "greedy": greedy, "waits": self._waits}
        run = _JITTED[decode, self._is_in_turn(rows)]
        return run(self._structure, self._leaves, state, stepping, **options)

    def clear(self, state: EngineState, pages: Any, slot: Any) -> EngineState:
        """Runs `clear`; the state is donated."""
        self.used.add((clear,))
        return _jit_clear(state, pages, slot, self._mesh)

    def decoding_size(self, rows: int, *, steps: int, greedy: bool) -> int:
        """The number of rows to which rows are padded."""
        sizes = self.decoding_sizes[greedy, steps]
        return next(size for size in sizes if size >= rows)

    def rider_size(self, rows: int, *, greedy: bool, scored: bool) -> int:
        """The number of rows to which rows that ride along are padded; 0 for none."""
        sizes = [0] if scored else self.rider_sizes.get(greedy, [0])
        return next(size for size in sizes if size >= rows)

    def reading_size(self, tokens: int, riders: int, *, greedy: bool, scored: bool) -> int:
        """The number of tokens to which a reading is padded. riders: places for rows that ride."""
        if scored:
            return self.scored_size
        return next(size for size in self.reading_sizes[greedy, riders > 0] if size >= tokens)
