"""The jitted programs of an engine, and the sizes to which their arguments are padded."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax

from mpjax.decoding import has_warpgroups
from mpjax.engine.histories import begin_history
from mpjax.engine.planner import Decode, Sizes, middle_chunk, scored_chunk, small_chunk
from mpjax.engine.programs import Drawn, PromptScores, Reading, Stepping, clear, decode, extend
from mpjax.engine.speculating import speculate
from mpjax.engine.state import EngineState
from mpjax.kernels import device
from mpjax.models import Decoder
from mpjax.speculation.proposer import Proposer, Speculation

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
        static_argnames=("scored", "steps", "most", "greedy", "waits"),
        donate_argnums=2,
        compiler_options={"xla_gpu_enable_pdl": False} if in_turn else None,
    )


# Engines over models of one structure, with equal sizes, share what is compiled.
_JITTED = {
    (function, in_turn): _jit(function, in_turn=in_turn)
    for function in (extend, decode, speculate)
    for in_turn in (False, True)
}
_jit_clear = jax.jit(clear, donate_argnums=0, static_argnums=3)
_jit_begin_history = jax.jit(begin_history, donate_argnames="histories")


def count() -> int:
    """The number of programs that were compiled so far, of all engines."""
    functions = *_JITTED.values(), _jit_clear, _jit_begin_history
    return sum(function._cache_size() for function in functions)


class Programs:
    """The jitted programs of one model, with the sizes to which their arguments are padded.

    limits: the sizes of the engine. proposer: of tokens that decoding verifies; None for none.

    Rows decode `steps` tokens in a program if all are greedy and nobody waits, and else one. The
    sizes are few: with those for scores, for clearing and for what proposers read there are at most
    15 programs.
    """

    def __init__(self, model: Decoder, limits: Sizes, proposer: Proposer | None = None) -> None:
        chunk, slots, steps = limits.chunk, limits.slots, limits.steps
        self._waits, self._proposer = not device.on_gpu(), proposer
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
        parts = {-(-slots // 8), slots}
        if not limits.proposed:  # proposers need a program themselves
            parts.add(-(-slots // 2))
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

    @property
    def holds_host(self) -> bool:
        """Whether `decode` returns when the device has nearly ended it: its loops need the host."""
        return self._proposer is not None and device.on_gpu()

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
        self, state: EngineState, stepping: Stepping, plan: Decode
    ) -> tuple[EngineState, Drawn]:
        """Runs `decode`, or with a proposer `speculate`; the state is donated."""
        rows, options = len(stepping.slots), {"steps": plan.steps, "greedy": plan.greedy}
        arguments: tuple[Any, ...] = self._structure, self._leaves, state, stepping
        if self._proposer is None:
            self.used.add((decode, rows, *options.values()))
            run = _JITTED[decode, self._is_in_turn(rows)]
            return run(*arguments, **options, waits=self._waits)
        self.used.add((speculate, rows, *options.values()))
        in_turn = any(self._is_in_turn(n) for n in (rows, rows * (self._proposer.k + 1)))
        run = _JITTED[speculate, in_turn]
        return run(*arguments, self._proposer, **options, most=plan.most)

    def begin_history(self, histories: Speculation | None, slot: Any, tokens: Any) -> Any:
        """Runs `begin_history`; the histories are donated."""
        self.used.add((begin_history,))
        return _jit_begin_history(self._proposer, histories, slot, tokens)

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
