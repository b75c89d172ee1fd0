"""The jitted programs of an engine, and the sizes to which their arguments are padded."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np

from mpjax.decoding import has_warpgroups
from mpjax.engine import filling
from mpjax.engine.histories import begin_history
from mpjax.engine.pages import NOWHERE
from mpjax.engine.planner import NOBODY, Decode
from mpjax.engine.programs import Drawn, PromptScores, Reading, Stepping, clear, decode, extend
from mpjax.engine.row import Row
from mpjax.engine.sizes import Sizes
from mpjax.engine.speculating import speculate
from mpjax.engine.state import EngineState
from mpjax.kernels import device
from mpjax.memory import free_bytes_on
from mpjax.models import Decoder
from mpjax.speculation.proposer import Proposer

# The memory that XLA takes while it times kernels for a product, over the bytes of the product's
# weight: a copy of the weight, and results.
TUNING_COPIES = 1.5
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


def _flat(*models: Any) -> tuple[_Structure, list[jax.Array]]:
    """The structure of models, which is static, and their arrays."""
    leaves, structure = jax.tree.flatten(models)
    return _Structure(structure), leaves


def _jit(function: Callable[..., Any], *, in_turn: bool) -> Any:
    """A program as a jitted function of the structure and arrays of its models, and of a state.

    in_turn: whether each kernel waits for the end of the one before (`decode_program`).
    """

    def run(structure: _Structure, leaves: list[jax.Array], *rest: Any, **how: Any) -> Any:
        return function(*jax.tree.unflatten(structure.structure, leaves), *rest, **how)

    run.__name__ = run.__qualname__ = function.__name__
    return jax.jit(
        run,
        static_argnums=0,
        static_argnames=("scored", "steps", "most", "greedy", "waits"),
        donate_argnums=2,
        compiler_options={"xla_gpu_enable_pdl": False} if in_turn else None,
    )


def _begin(proposer: Proposer, state: EngineState, *row: Any) -> EngineState:
    """The state in which a slot has the tokens of its next row; see `begin_history`."""
    assert state.speculation is not None
    histories = begin_history(proposer, state.speculation, *row)
    return dataclasses.replace(state, speculation=histories)


# Engines over models of one structure, with equal sizes, share what is compiled.
_JITTED = {
    (function, in_turn): _jit(function, in_turn=in_turn)
    for function in (extend, decode, speculate, _begin)
    for in_turn in (False, True)
}
_jit_clear = jax.jit(clear, donate_argnums=0, static_argnums=3)


def count() -> int:
    """The number of programs that were compiled so far, of all engines."""
    return sum(function._cache_size() for function in (*_JITTED.values(), _jit_clear))


class _Call(NamedTuple):
    """A call of a jitted function.

    name: as `Programs.used` has it. modules: what is behind the function, as `_flat` gives it;
    empty for no module. arguments: behind the state.
    """

    name: tuple[Any, ...]
    run: Any
    modules: tuple[Any, ...]
    arguments: tuple[Any, ...]
    how: dict[str, Any]


class Programs:
    """The jitted programs of one model, with the sizes to which their arguments are padded.

    limits: the sizes of the engine. proposer: of tokens that decoding verifies; None for none.

    Rows decode `steps` tokens in a program if all are greedy and nobody waits, and else one. The
    sizes are few: with those for scores, for clearing and for what proposers read there are at most
    15 programs. With fine sizes there are more, of which most are rarely used.
    """

    def __init__(self, model: Decoder, limits: Sizes, proposer: Proposer | None = None) -> None:
        slots, steps = limits.slots, limits.steps
        self._waits, self._proposer, self._limits = not device.on_gpu(), proposer, limits
        # By whether all rows are greedy, and whether there are places for rows that ride along.
        # Where not all rows are greedy, places may be empty.
        kinds = [(True, False), (False, limits.rides), *([(True, True)] if limits.rides else [])]
        self.reading_sizes = {
            (greedy, riders): limits.reading_sizes(greedy=greedy, scored=False, riders=riders)
            for greedy, riders in kinds
        }
        [self.scored_size] = limits.reading_sizes(greedy=False, scored=True)
        few = sorted({-(-slots // 4), slots})
        self.rider_sizes = {True: [0, *few], False: [slots]} if limits.rides else {}
        parts = {-(-slots // 8), slots}
        if not limits.proposed:  # proposers need a program themselves
            parts.add(-(-slots // 2))
        # By whether all rows are greedy, and the number of steps.
        self.decoding_sizes = {
            (True, steps): limits.row_sizes(
                slots, {1, min(FEW_ROWS, slots), *(n for n in parts if n > FEW_ROWS)}
            ),
            (False, 1): limits.row_sizes(slots, {min(2 * FEW_ROWS, slots), slots}),
        }
        if not limits.rides or model.config.rereads_after is not None:
            self.decoding_sizes.setdefault((True, 1), limits.row_sizes(slots, {slots}))
        most = limits.sequences
        self.piece_sizes = sorted({1, most}) if limits.fine else [most]
        self.used: set[tuple[Any, ...]] = set()  # what tells compiled programs apart
        # A model has many modules. Its arrays alone are quickly passed to a program.
        self._model = _flat(model)
        self._both, self._alone = _flat(model, proposer), _flat(proposer)
        self._mesh = model.mesh
        self._is_by_length = model.config.scaling_by_length is not None
        self._is_in_turn = functools.cache(functools.partial(has_warpgroups, model))

    @property
    def holds_host(self) -> bool:
        """Whether `decode` returns when the device has nearly ended it: its loops need the host."""
        return self._proposer is not None and device.on_gpu()

    def compile(self, state: EngineState, *, greedy_only: bool) -> EngineState:
        """Compiles all programs, several at a time; see Engine.compile.

        Each is then run without rows. The state is donated; the one that is returned has the same
        rows and pages.
        """
        calls = [*self._calls(*state.tables.shape, greedy_only=greedy_only)]
        calls += self._calls_of_slots(state)
        lowered = [
            call.run.lower(*call.modules, state, *call.arguments, **call.how) for call in calls
        ]
        with concurrent.futures.ThreadPoolExecutor(self._compilers()) as pool:
            [*pool.map(lambda each: each.compile(), lowered)]
        for call in calls * 2:  # the second run of a program records its launches
            found = self._run(call, state)
            state = found if isinstance(found, EngineState) else found[0]
        return state

    def _compilers(self) -> int | None:
        """The most programs that are compiled at once; None for as many as the host likes.

        While XLA compiles a program for a GPU, it times kernels for products, with operands of its
        own: one at a time, of which a weight may be the largest.
        """
        free = free_bytes_on(self._mesh) if device.on_gpu() else None
        if free is None:
            return None
        devices = 1 if self._mesh is None else self._mesh.size
        largest = max(leaf.nbytes for leaf in self._model[1]) / devices
        return max(1, int(free / (TUNING_COPIES * largest)))

    def _calls(self, slots: int, entries: int, *, greedy_only: bool) -> Iterator[_Call]:
        """All calls of the model that there are, without rows; of columns the fewest alone."""
        columns = self._limits.column_sizes(entries)[0]
        size, narrow = {"slots": slots}, {"entries": entries, "columns": columns}
        read = functools.partial(
            filling.reading, [], entries=columns, by_length=self._is_by_length, **size
        )
        for (greedy, rides), sizes in self.reading_sizes.items():
            if greedy_only and not greedy:
                continue
            places = [n for n in self.rider_sizes[greedy] if n] if rides else [0]
            for tokens, rows, pieces in itertools.product(sizes, places, self.piece_sizes):
                reading = read(tokens=tokens, rows=pieces)
                riders = None
                if rows:
                    riders = filling.stepping(NOBODY, rows=rows, **size, **narrow)
                yield self._extend_call(reading, riders, greedy=greedy, scored=False)
        for (greedy, steps), sizes in self.decoding_sizes.items():
            if greedy_only and not greedy:
                continue
            plan = Decode([], steps, greedy, [], self._limits.most_drawn(steps))
            for rows in sizes:
                stepping = filling.stepping(plan, rows=rows, **size, **narrow)
                yield self._decode_call(stepping, plan)
        if not greedy_only:
            for pieces in self.piece_sizes:
                reading = read(tokens=self.scored_size, rows=pieces)
                yield self._extend_call(reading, None, greedy=False, scored=True)

    def _calls_of_slots(self, state: EngineState) -> Iterator[_Call]:
        """All calls that change a slot between programs of the model, with a slot too high."""
        slots, entries = state.tables.shape
        yield self._clear_call(np.full(entries, NOWHERE, np.int32), np.int32(slots))
        if state.speculation is not None:
            tokens = np.zeros(state.speculation.history.shape[1], np.int32)
            yield self._begin_call(np.int32(slots), tokens, np.int32(0))

    def _run(self, call: _Call, state: EngineState) -> Any:
        self.used.add(call.name)
        return call.run(*call.modules, state, *call.arguments, **call.how)

    def _extend_call(
        self, reading: Reading, riders: Stepping | None, *, greedy: bool, scored: bool
    ) -> _Call:
        tokens, rows = len(reading.tokens), 0 if riders is None else len(riders.slots)
        run, how = _JITTED[extend, self._is_in_turn(tokens + rows)], (greedy, scored)
        name = (extend, tokens, rows, *how, *reading.tables.shape)
        options = {"greedy": greedy, "scored": scored}
        return _Call(name, run, self._model, (reading, riders), options)

    def _decode_call(self, stepping: Stepping, plan: Decode) -> _Call:
        rows, how = len(stepping.slots), {"steps": plan.steps, "greedy": plan.greedy}
        if self._proposer is None:
            name = decode, rows, *how.values(), stepping.columns
            run = _JITTED[decode, self._is_in_turn(rows)]
            return _Call(name, run, self._model, (stepping,), how | {"waits": self._waits})
        in_turn = any(self._is_in_turn(n) for n in (rows, rows * (self._proposer.k + 1)))
        name = speculate, rows, *how.values(), stepping.columns
        run = _JITTED[speculate, in_turn]
        return _Call(name, run, self._both, (stepping,), how | {"most": plan.most})

    def _begin_call(self, *row: Any) -> _Call:
        return _Call((begin_history,), _JITTED[_begin, False], self._alone, row, {})

    def _clear_call(self, pages: Any, slot: Any) -> _Call:
        return _Call((clear,), _jit_clear, (), (pages, slot, self._mesh), {})

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
        return self._run(self._extend_call(reading, riders, greedy=greedy, scored=scored), state)

    def decode(
        self, state: EngineState, stepping: Stepping, plan: Decode
    ) -> tuple[EngineState, Drawn]:
        """Runs `decode`, or with a proposer `speculate`; the state is donated."""
        return self._run(self._decode_call(stepping, plan), state)

    def begin_history(self, state: EngineState, *row: Any) -> EngineState:
        """Runs `begin_history`; the state is donated."""
        begun: EngineState = self._run(self._begin_call(*row), state)
        return begun

    def clear(self, state: EngineState, pages: Any, slot: Any) -> EngineState:
        """Runs `clear`; the state is donated."""
        cleared: EngineState = self._run(self._clear_call(pages, slot), state)
        return cleared

    def decoding_size(self, rows: int, *, steps: int, greedy: bool) -> int:
        """The number of rows to which rows are padded."""
        sizes = self.decoding_sizes[greedy, steps]
        return next(size for size in sizes if size >= rows)

    def piece_size(self, pieces: int) -> int:
        """The number of pieces to which pieces are padded."""
        return next(size for size in self.piece_sizes if size >= pieces)

    def column_size(self, rows: Iterable[Row], entries: int) -> int:
        """The entries of block tables that are read, of `entries`: those of the rows' pages."""
        needed = max(len(row.pages) for row in rows)
        return next(size for size in self._limits.column_sizes(entries) if size >= needed)

    def rider_size(self, rows: int, *, greedy: bool, scored: bool) -> int:
        """The number of rows to which rows that ride along are padded; 0 for none."""
        sizes = [0] if scored else self.rider_sizes.get(greedy, [0])
        return next(size for size in sizes if size >= rows)

    def reading_size(self, tokens: int, riders: int, *, greedy: bool, scored: bool) -> int:
        """The number of tokens to which a reading is padded. riders: places for rows that ride."""
        if scored:
            return self.scored_size
        return next(size for size in self.reading_sizes[greedy, riders > 0] if size >= tokens)
