"""The jitted programs of an engine, and the sizes to which their arguments are padded."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mpjax.adapters.collection import Adapters
from mpjax.constraints.matcher import mask_words
from mpjax.engine import filling
from mpjax.engine.calls import JITTED, Call, begin, flat, reused, shapes_of
from mpjax.engine.choosing import Forwarded, choose, forward
from mpjax.engine.controlled import PackedControl, begin_control
from mpjax.engine.histories import begin_history
from mpjax.engine.planner import Decode
from mpjax.engine.programs import (
    Drawn,
    PromptScores,
    Reading,
    Stepping,
    clear,
    copy,
    decode,
    extend,
)
from mpjax.engine.row import Row
from mpjax.engine.sizes import Sizes
from mpjax.engine.speculating import speculate
from mpjax.engine.state import committed, places
from mpjax.generation.decoding import has_warpgroups
from mpjax.generation.speculation.proposer import Proposer
from mpjax.generation.state import State
from mpjax.kernels import device
from mpjax.memory import free_bytes_on
from mpjax.models import Decoder
from mpjax.models.low_rank import Adapted

# Memory of XLA's GEMM autotuning, as a multiple of the weight's bytes: a copy of the weight, and
# results.
TUNING_COPIES = 1.5
# The most programs of an engine, including those for scoring, clearing, copies and proposers, and
# the most further ones for rows with logits processors. Neither counts the programs for rows with
# adapters or captures.
MOST_PROGRAMS, MOST_CONTROLLED = 18, 16
FEW_ROWS = 4  # a decoding step of 2 or 3 rows takes as long as one of 4


def _for_adapters(arguments: Any, adapted: bool) -> Any:
    """The arguments of a program on empty rows; adapted: with adapter indices, all 0 (none)."""
    none = np.zeros(len(arguments.slots), np.int32)
    return dataclasses.replace(arguments, adapters=none) if adapted else arguments


class Programs:
    """The jitted programs of an engine, with the sizes to which their arguments are padded.

    limits: the sizes of the engine. proposer: proposes the tokens that decoding verifies, or None.
    adapters: the adapters that rows may have. Batches without adapters run the base model's
    programs.

    A decoding program has `steps` steps, or one while a request waits or a row is constrained.
    With fine sizes there are more than MOST_PROGRAMS, most of them rarely used.
    """

    def __init__(
        self,
        model: Decoder,
        limits: Sizes,
        proposer: Proposer | None = None,
        adapters: Adapters | None = None,
    ) -> None:
        slots, steps = limits.slots, limits.steps
        self._waits, self._proposer, self._limits = not device.on_gpu(), proposer, limits
        # Key: whether all rows are greedy.
        self.reading_sizes = {
            greedy: limits.reading_sizes(greedy=greedy, scored=False) for greedy in (True, False)
        }
        [self.scored_size] = limits.reading_sizes(greedy=False, scored=True)
        parts = {-(-slots // 8), slots}
        if not limits.proposed:  # a proposer needs a program of its own
            parts.add(-(-slots // 2))
        # Key: whether all rows are greedy, and the number of steps.
        self.decoding_sizes = {
            (True, steps): limits.row_sizes(
                slots, {1, min(FEW_ROWS, slots), *(n for n in parts if n > FEW_ROWS)}
            ),
            **dict.fromkeys(
                [(False, steps), (False, 1)],
                limits.row_sizes(slots, {min(2 * FEW_ROWS, slots), slots}),
            ),
        }
        self.decoding_sizes.setdefault((True, 1), limits.row_sizes(slots, {slots}))
        self.piece_sizes = limits.piece_sizes()
        self.used: set[tuple[Any, ...]] = set()  # keys of the compiled programs
        self.tell: Callable[..., None] | None = None  # tells other processes of each launch
        # Passing flat arrays to a jitted function is faster than flattening a model's many modules.
        self._model = flat(model)
        self._both, self._alone = flat(model, proposer), flat(proposer)
        self._base: Decoder | None = model
        self._adapters = adapters or Adapters()
        # Key: the number of proposers (0 or 1). Value: the adapters' version, and `flat` of the
        # adapted model.
        self._adapted: dict[int, tuple[int, Any]] = {}
        self._none, self._columns = flat(), model.columns
        self.positions = 1 + limits.proposed  # sampled by a step
        self._mesh, self._groups = model.mesh, len(model.config.page_groups)
        self._in_turn: dict[int, bool] = {}  # by the number of rows
        self._last: tuple[Any, Any] = jax.tree.flatten(None), None  # what `put` got and returned
        self._results: dict[Any, Any] = {}  # of the last runs, by the name of the call

    def renew(self, model: Decoder | None) -> None:
        """Takes the arrays of a model of the same structure; None releases the old arrays."""
        for name, beside in (("_model", ()), ("_both", (self._proposer,))):
            old = getattr(self, name)[0]
            new, leaves = (old, []) if model is None else flat(model, *beside)
            setattr(self, name, (old if old == new else new, leaves))
        self._base = model
        self._results.clear()
        self._adapted = {count: (-1, (flat[0], [])) for count, (_, flat) in self._adapted.items()}

    def _is_in_turn(self, rows: int) -> bool:
        """Whether a program of this many rows runs products by warpgroup kernels."""
        if rows not in self._in_turn:
            assert self._base is not None
            self._in_turn[rows] = has_warpgroups(self._base, rows)
        return self._in_turn[rows]

    @property
    def holds_host(self) -> bool:
        """Whether `decode` blocks until it has nearly ended: its while loops need the host."""
        return self._proposer is not None and device.on_gpu()

    def compile(
        self, state: State, *, greedy_only: bool, control: PackedControl | None = None
    ) -> State:
        """Compiles all programs, several at a time, and runs each twice on empty rows.

        The state is donated; the returned one has the same rows and pages. control: a placeholder,
        given if the state has logits processors; then only the programs for non-greedy rows and the
        one that writes a row's processors are compiled.
        """
        calls = [*self._calls(state, greedy_only=greedy_only)]
        if self._adapters.stacks:
            calls += self._calls(state, greedy_only=greedy_only, adapted=True)
        calls += self._calls_of_slots(state) if control is None else []
        if control is not None:
            calls = [call for call in calls if not call.how.get("greedy")]
            tokens, outside = self._row_tokens(state), len(state.counts)
            calls += [
                self._begin_control_call(filling.numbers(outside, 0, count, tokens), control)
                for count in (0, 1)
            ]
        lowered = [
            call.run.lower(
                *call.modules, call.own(state), *call.arguments, **self._how(call, state)
            )
            for call in calls
        ]
        with concurrent.futures.ThreadPoolExecutor(self._compilers()) as pool:
            [*pool.map(lambda each: each.compile(), lowered)]
        for call in calls * 2:  # XLA captures a program's CUDA graphs in its second run
            found = self._run(call, state)
            state = found if isinstance(found, State) else found[0]
        return state

    def _compilers(self) -> int | None:
        """The most programs to compile at once; None for no limit.

        XLA's autotuning times GEMM kernels with operands of its own, in each compilation one GEMM
        at a time. The limit is what fits into free memory if each has the largest weight.
        """
        free = free_bytes_on(self._mesh) if device.on_gpu() else None
        if free is None:
            return None
        devices = 1 if self._mesh is None else self._mesh.size
        largest = max(leaf.nbytes for leaf in self._model[1]) / devices
        return max(1, int(free / (TUNING_COPIES * largest)))

    def _calls(self, state: State, *, greedy_only: bool, adapted: bool = False) -> Iterator[Call]:
        """Calls of all the model's programs with empty rows, for the narrowest block tables only.

        adapted: whether they are the programs for rows with adapters.
        """
        layout, (_, entries) = filling.Layout.of(state), places(state)
        columns = self._limits.column_sizes(entries)[0]
        masks = self.no_masks if state.processors else None
        read = functools.partial(filling.reading, [], layout, entries=columns, masks=masks)
        for greedy, sizes in self.reading_sizes.items():
            if greedy_only and not greedy:
                continue
            for tokens, pieces in itertools.product(sizes, self.piece_sizes):
                reading = _for_adapters(read(tokens=tokens, rows=pieces), adapted)
                yield self._extend_call(reading, greedy=greedy, scored=False)
        for (greedy, steps), sizes in self.decoding_sizes.items():
            if greedy_only and not greedy:
                continue
            plan = Decode([], steps, greedy, [], self._limits.most_drawn(steps))
            for rows in sizes:
                stepping = filling.stepping(
                    plan, layout, rows=rows, entries=entries, columns=columns
                )
                stepping = _for_adapters(stepping, adapted)
                yield self._decode_call(stepping, plan)
                if state.processors and plan.steps == 1 and not greedy:
                    yield from self._pair_calls(state, stepping, plan)
        if not greedy_only:
            for pieces in self.piece_sizes:
                reading = _for_adapters(read(tokens=self.scored_size, rows=pieces), adapted)
                yield self._extend_call(reading, greedy=False, scored=True)

    def _pair_calls(self, state: State, stepping: Stepping, plan: Decode) -> Iterator[Call]:
        """Calls of the programs of a constrained step."""
        yield (first := self._forward_call(stepping, plan))
        masks = self.no_masks(len(stepping.slots))
        found = self._zeros(shapes_of(first, state)[1]), masks
        yield self._choose_call(stepping, plan, *found)
        if self._proposer is None:
            yield self._choose_call(stepping, plan, *found, likeliest=True)

    def _calls_of_slots(self, state: State) -> Iterator[Call]:
        """Calls of all programs that change one slot, with a slot out of range."""
        slots, entries = places(state)
        nowhere = filling.padded([[]] * self._groups, entries)
        outside = np.int32(slots + self._limits.snapshots)  # recurrent states have as many places
        yield self._clear_call(nowhere, outside)
        if self._limits.snapshots:
            yield self._copy_call(np.int32(0), outside)
        if state.speculation is not None:
            yield self._begin_history_call(np.int32(slots), self._row_tokens(state), np.int32(0))

    def _row_tokens(self, state: State) -> np.ndarray:
        """Zeros int32 [the most tokens of a row]."""
        return np.zeros(places(state)[1] * state.cache.page_size, np.int32)

    def _run(self, call: Call, state: State) -> Any:
        self.used.add((*call.name, bool(state.processors)))
        how = self._how(call, state)
        found = call.run(*call.modules, call.own(state), *call.arguments, **how)
        if isinstance(found, State):
            return call.whole(found, state)
        if call.reuses:
            self._results[call.name] = reused(found[1])
        return call.whole(found[0], state), *found[1:]

    def _how(self, call: Call, state: State) -> dict[str, Any]:
        """The keyword arguments of a call, with the results of its last run if it reuses them.

        Results at the same addresses spare the update of CUDA graphs, which takes a millisecond.
        """
        if not call.reuses:
            return call.how
        if call.name not in self._results:
            shape = len(call.arguments[0].slots), self._columns
            logits = jax.ShapeDtypeStruct(shape, jnp.float32)
            is_first = call.name[0] is forward
            shapes = logits if is_first else reused(shapes_of(call, state)[1])
            self._results[call.name] = self._zeros(shapes)
        return call.how | {"before": self._results[call.name]}

    def _zeros(self, shapes: Any) -> Any:
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
        return committed(zeros, self._mesh)

    def put(self, stepping: Stepping) -> Stepping:
        """Puts the arguments of a decoding program on the device, unless they were the last ones.

        Then the program's arguments are at the same addresses, so that its CUDA graph stays.
        """
        (before, known), there = self._last
        leaves, structure = jax.tree.flatten(stepping)
        if known != structure or not all(
            old is new or np.array_equal(old, new) for old, new in zip(before, leaves, strict=True)
        ):
            there = jax.device_put(stepping)
            self._last = (leaves, structure), there
        return there

    def _with_adapters(self, adapters: Any, *proposer: Proposer | None) -> Any:
        """`flat` of the models of a program. adapters: indices of the rows' adapters, or None.

        proposer: only for a program that speculates.
        """
        if adapters is None:
            return self._both if proposer else self._model
        version, before = self._adapted.get(len(proposer), (-1, None))
        if version != self._adapters.version:
            version = self._adapters.version
            found = flat(Adapted(self._base, self._adapters.stacks), *proposer)
            if before is not None and before[0] == found[0]:
                found = before[0], found[1]  # the same object is compared fast
            self._adapted[len(proposer)] = version, found
        return self._adapted[len(proposer)][1]

    def _extend_call(self, reading: Reading, *, greedy: bool, scored: bool) -> Call:
        tokens, how = len(reading.tokens), {"greedy": greedy, "scored": scored}
        run = JITTED[extend, self._is_in_turn(tokens)]
        columns = [table.shape[1] for table in reading.tables]
        modules = self._with_adapters(reading.adapters)
        with_adapters = None if reading.adapters is None else modules[0]
        kind = None if reading.watching is None else reading.watching.kind
        name = (extend, tokens, *how.values(), len(reading.slots), *columns, with_adapters, kind)
        return Call(name, run, modules, (reading,), how | {"width": self._limits.width})

    def _decode_call(self, stepping: Stepping, plan: Decode) -> Call:
        rows, how = len(stepping.slots), {"steps": plan.steps, "greedy": plan.greedy}
        proposer = () if self._proposer is None else (self._proposer,)
        modules = self._with_adapters(stepping.adapters, *proposer)
        with_adapters = None if stepping.adapters is None else modules[0]
        kind = None if stepping.watching is None else stepping.watching.kind
        name = rows, *how.values(), stepping.columns, with_adapters, kind
        if self._proposer is None:
            run = JITTED[decode, self._is_in_turn(rows)]
            return Call((decode, *name), run, modules, (stepping,), how | {"waits": self._waits})
        in_turn = any(self._is_in_turn(n) for n in (rows, rows * (self._proposer.k + 1)))
        run = JITTED[speculate, in_turn]
        return Call((speculate, *name), run, modules, (stepping,), how | {"most": plan.most})

    def _forward_call(self, stepping: Stepping, plan: Decode) -> Call:
        return self._pair_call(forward, (stepping,), plan)

    def _choose_call(
        self, stepping: Stepping, plan: Decode, *found: Any, likeliest: bool = False
    ) -> Call:
        call = self._pair_call(choose, (stepping, *found), plan)
        if not likeliest:
            return call
        return call._replace(name=(*call.name, likeliest), needs=frozenset())

    def _pair_call(self, function: Any, arguments: tuple[Any, ...], plan: Decode) -> Call:
        rows, columns = len(arguments[0].slots), arguments[0].columns
        modules = self._with_adapters(arguments[0].adapters, self._proposer)
        run = JITTED[function, self._is_in_turn(rows * self.positions)]
        watching = arguments[0].watching
        name = function, rows, columns, modules[0], None if watching is None else watching.kind
        call = Call(name, run, modules, arguments, {"most": plan.most})
        if self._proposer is not None:
            return call
        call = call._replace(reuses=self._mesh is None)
        if function is forward:
            return call._replace(needs=frozenset({"layers"}))
        return call._replace(modules=(modules[0], []), needs=frozenset({"processors"}))

    def _begin_history_call(self, *row: Any) -> Call:
        return Call((begin_history,), JITTED[begin, False], self._alone, row, {})

    def _begin_control_call(self, numbers: np.ndarray, control: PackedControl | None) -> Call:
        how = {"vocabulary": self._columns, "advances": bool(numbers[1] < numbers[2])}
        name = begin_control, control is None, how["advances"]
        run, needs = JITTED[begin_control, False], frozenset({"processors"})
        return Call(name, run, self._none, (numbers, control), how, needs)

    def _clear_call(self, pages: Any, slot: Any) -> Call:
        return Call((clear,), JITTED[clear, False], self._model, (pages, slot), {})

    def _copy_call(self, source: Any, target: Any) -> Call:
        return Call((copy,), JITTED[copy, False], self._model, (source, target), {})

    def _launch(self, name: str, state: State, *arguments: Any, **how: Any) -> Any:
        if self.tell is not None:
            self.tell(name, bool(state.processors), arguments, how)
        return self._run(getattr(self, f"_{name}_call")(*arguments, **how), state)

    def extend(
        self,
        state: State,
        reading: Reading,
        *,
        greedy: bool,
        scored: bool,
    ) -> tuple[State, Drawn, PromptScores | None]:
        """Runs `extend`; the state is donated."""
        self._results.clear()  # the program needs their memory
        return self._launch("extend", state, reading, greedy=greedy, scored=scored)

    def decode(self, state: State, stepping: Stepping, plan: Decode) -> tuple[State, Drawn]:
        """Runs `decode`, or with a proposer `speculate`; the state is donated."""
        self._results.clear()
        return self._launch("decode", state, stepping, plan)

    def forward(self, state: State, stepping: Stepping, plan: Decode) -> tuple[State, Forwarded]:
        """Runs `forward`; the state is donated."""
        return self._launch("forward", state, stepping, plan)

    def choose(
        self,
        state: State,
        stepping: Stepping,
        plan: Decode,
        forwarded: Forwarded,
        masks: Any,
        *,
        likeliest: bool,
    ) -> tuple[State, Drawn]:
        """Runs `choose` after `forward`; the state is donated."""
        return self._launch("choose", state, stepping, plan, forwarded, masks, likeliest=likeliest)

    def no_masks(self, rows: int, positions: int | None = None) -> np.ndarray:
        """Masks uint32 [rows, positions, words] that allow every token."""
        shape = rows, positions or self.positions, mask_words(self._columns)
        return np.full(shape, ~np.uint32(0))

    def begin_history(self, state: State, *row: Any) -> State:
        """Runs `begin_history`; the state is donated."""
        begun: State = self._launch("begin_history", state, *row)
        return begun

    def begin_control(self, state: State, *row: Any) -> State:
        """Runs `begin_control`; the state is donated."""
        begun: State = self._launch("begin_control", state, *row)
        return begun

    def clear(self, state: State, pages: Any, slot: Any) -> State:
        """Runs `clear`; the state is donated."""
        cleared: State = self._launch("clear", state, pages, slot)
        return cleared

    def copy(self, state: State, source: Any, target: Any) -> State:
        """Runs `copy`; the state is donated."""
        copied: State = self._launch("copy", state, source, target)
        return copied

    def decoding_size(self, rows: int, *, steps: int, greedy: bool) -> int:
        """The compiled batch size to which a decoding program's rows are padded."""
        sizes = self.decoding_sizes[greedy, steps]
        return next(size for size in sizes if size >= rows)

    def piece_size(self, pieces: int) -> int:
        """The compiled number of pieces to which a prefill program's pieces are padded."""
        return next(size for size in self.piece_sizes if size >= pieces)

    def column_size(self, rows: Iterable[Row], entries: int) -> int:
        """The compiled width of block tables, up to `entries`, that holds the rows' pages."""
        needed = max((len(pages) for row in rows for pages in row.pages), default=0)
        return next(size for size in self._limits.column_sizes(entries) if size >= needed)

    def reading_size(self, tokens: int, *, greedy: bool, scored: bool) -> int:
        """The compiled prefill size, in tokens, to which a program's tokens are padded."""
        if scored:
            return self.scored_size
        return next(size for size in self.reading_sizes[greedy] if size >= tokens)
